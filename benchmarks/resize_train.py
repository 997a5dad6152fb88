"""Trains a model of a given size in megabytes and records the time of every step; see resize.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

WIDTH = 1000
"""A square layer of this width has 4 MB of parameters."""


def train(config: dict[str, Any], run: Run) -> None:
    """Trains until it is stopped; the end of every step goes to a file as `time workers loss`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(config["mb"] // 4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1 << 14, WIDTH)
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    with Path(config["times"]).open("a") as file:
        for _ in run.epochs(1_000_000):
            for (batch,) in loader:
                optimizer.zero_grad()
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                optimizer.step()
                if run.is_main:
                    mean = loss.item() if run.workers == 1 else float("nan")
                    file.write(f"{time.monotonic()} {run.workers} {mean}\n")
                    file.flush()
