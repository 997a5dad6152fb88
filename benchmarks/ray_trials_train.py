"""A short trial for ray_trials.py, as either side trains it: a small network, three epochs of a few steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

EPOCHS = 3
STEPS = 10
BATCH = 32


class Trained:
    """A network and its training data."""

    def __init__(self, lr: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        x = torch.randn(STEPS * BATCH, 16)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        return float(loss)


def train(config: dict[str, Any], run: Run) -> None:
    """Stretto's trial."""
    trained = Trained(config["lr"])
    run.prepare(trained.model, trained.optimizer, trained.loader)
    for _epoch in run.epochs(EPOCHS):
        for x, y in trained.loader:
            loss = trained.step(x, y)
        run.report(loss=loss)


def ray_trial(config: dict[str, Any]) -> None:
    """Ray Tune's."""
    from ray import tune  # noqa: PLC0415 - in a process of Ray's

    trained = Trained(config["lr"])
    for _epoch in range(EPOCHS):
        for x, y in trained.loader:
            loss = trained.step(x, y)
        tune.report({"loss": loss})
