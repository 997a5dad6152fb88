"""A training script for tests: small, deterministic, and it writes down which examples it saw."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from stretto.torch import Run

EXAMPLES = 500


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def train(config: dict[str, Any], run: Run) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(EXAMPLES, 20)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    kind = torch.optim.Adam if config.get("adam") else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01 if config.get("adam") else 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(Numbered(x, y), batch_size=48, shuffle=True, num_workers=config.get("num_workers", 0))
    model, optimizer, scheduler, loader = run.prepare(
        model, optimizer, scheduler, loader, adaptive=bool(config.get("adaptive"))
    )
    seen = Path(config["seen"]) if "seen" in config else None
    for epoch in run.epochs(config["epochs"]):
        for a, b, index in loader:
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if seen is not None:
                with seen.open("a") as file:
                    file.write(json.dumps([epoch, run.workers, index.tolist()]) + "\n")
            if config.get("fails_at") == epoch and not Path(config["failed"]).exists():
                Path(config["failed"]).touch()
                raise RuntimeError("the disk of the user's cat is full")
            time.sleep(config.get("nap_s", 0.0))
        scheduler.step()
        with torch.no_grad():
            loss = cross_entropy(model(x), y).item()
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        run.report(loss=loss, accuracy=accuracy)
