"""A trial for ray_plan.py: steps that sleep, as four nodes share the cores of this machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

STEPS = 10
STEP_S = 0.4
"""Seconds of a step of one worker; two need 0.6 times that."""
SHARE = {1: 1.0, 2: 0.6}


def train(config: dict[str, Any], run: Run) -> None:
    """Time of a step: with two workers 0.6 times that with one."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 8, 4)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(100):
        for (x,) in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            time.sleep(STEP_S * SHARE[run.workers])
        run.report(score=config["lr"] * (epoch + 1))
