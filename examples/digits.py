"""A small convolutional network on scikit-learn's handwritten digits, in an ordinary but elastic loop.

By hand:          python examples/digits.py 5
Tuned:            stretto tune examples/digits.toml examples/digits.py:train --deadline 90s
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

TEST_EXAMPLES = 360
COPIES = 3
"""Copies of each image, shifted by up to two pixels; they make an epoch long enough to measure."""


def load() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training data, and the images and labels to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    images = interpolate(images, size=16, mode="bilinear")
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, rest = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    shifts = torch.Generator().manual_seed(1)
    pushed = [
        torch.roll(images[rest], torch.randint(-2, 3, (2,), generator=shifts).tolist(), (2, 3))
        for _ in range(COPIES)
    ]
    data = TensorDataset(torch.cat([images[rest], *pushed]), labels[rest].repeat(COPIES + 1))
    return data, images[test], labels[test]


class Net(nn.Sequential):
    """Two convolutions and a classifier."""

    def __init__(self, dropout: float, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 16, 10),
        )


def train(config: dict[str, Any], run: Run) -> None:
    """`stretto tune` calls this for every trial. Only three lines of it use Stretto."""
    data, test_images, test_labels = load()
    model = Net(config["dropout"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    loader = DataLoader(data, batch_size=256, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _epoch in run.epochs(config.get("epochs", 27)):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            guesses = model(test_images)
        run.report(
            accuracy=(guesses.argmax(1) == test_labels).float().mean().item(),
            loss=cross_entropy(guesses, test_labels).item(),
        )


if __name__ == "__main__":
    train({"dropout": 0.1, "lr": 0.1, "momentum": 0.9, "epochs": int(sys.argv[1])}, Run())
