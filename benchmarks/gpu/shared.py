"""What the scripts for one card share: networks, a clock that waits for the card, and where results go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.data import Dataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = width_in == width and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.body(images) + self.shortcut(images))


def resnet18(channels: int = 3) -> nn.Module:
    """For small images and 10 classes: 11 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for next_width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, next_width, stride), Block(next_width, next_width, 1)]
        width = next_width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).to(DEVICE)


class OnCard(Dataset[Any]):
    """Images and labels that lie on the card; a batch is fetched at once."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices, device=self.images.device)
        return self.images[rows], self.labels[rows]


def as_it_is(batch: Any) -> Any:
    """The identity, for batches that are complete already."""
    return batch


def random_images(number: int) -> OnCard:
    return OnCard(torch.randn(number, 3, 32, 32, device=DEVICE), torch.randint(10, (number,), device=DEVICE))


def now_s() -> float:
    """The time when all work queued on the GPU is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


def use_tensor_cores() -> None:
    """The usual settings for such GPUs."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def save(name: str, result: dict[str, Any]) -> None:
    """Writes the results to the folder $OUT, if it is set."""
    folder = os.environ.get("OUT")
    if folder:
        Path(folder, f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"
