"""A training script for tests with two elastic loops an epoch, which writes down the examples of each."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from stretto.torch import Run

EPOCHS = 4
TRAINED, CHECKED = 240, 90


class Shuffled(Sampler[int]):
    """As people write them."""

    def __len__(self) -> int:
        return TRAINED

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(TRAINED), TRAINED))


def train(config: dict[str, Any], run: Run) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loading: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    data, checks = (TensorDataset(torch.arange(float(count))[:, None]) for count in (TRAINED, CHECKED))
    model, optimizer, loader, check = run.prepare(
        model,
        optimizer,
        DataLoader(data, batch_size=24, sampler=Shuffled(), **loading),
        DataLoader(checks, batch_size=20, **loading),
        adaptive=True,
        max_batch_size=24,
    )
    for epoch in run.epochs(EPOCHS):
        for name, loop in (("check", check), ("train", loader)):
            for (x,) in loop:
                with Path(config["seen"]).open("a") as file:
                    file.write(json.dumps([epoch, name, run.workers, x.flatten().tolist()]) + "\n")
                if name == "train":
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                time.sleep(0.01)
        run.report(loss=1.0)
