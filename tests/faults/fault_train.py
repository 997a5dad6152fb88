"""A training script that writes down which examples lead to its state, and into which traps may be laid.

What a run saw is part of its state: each start from a checkpoint opens a stretch under a mark of its own, and
every step is written down under the mark of the stretch it belongs to. The stretches of a state say which of
the steps written down led to it; the others were lost and done again.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from stretto.torch import Run

EXAMPLES = 100
BATCH = 12
"""Does not divide the examples, so that the last step of an epoch is a small one."""
STEPS = math.ceil(EXAMPLES / BATCH)
EPOCHS = 100
"""More than any study asks for."""
BALLAST = 1 << 16
"""Numbers that make a checkpoint larger than anything else a worker writes."""
SEEN = "seen.jsonl"
RAISE = "raise"
"""While this file is there, the next step raises and removes it."""
FLOOD = "flood"
"""While this file is there, the next step prints without measure and removes it."""
FLOOD_LINES = 50_000
POISON = "poison"
"""Has the number of the step whose loss is no number, also when that step is done again."""


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(1)
        self.x = torch.randn(EXAMPLES, 8, generator=chance, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Ledger:
    """The stretches of training that led to the present state: a mark, and the step each begins with."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.step = 0
        self.stretches: list[tuple[str, int]] = [(uuid.uuid4().hex, 0)]

    @property
    def mark(self) -> str:
        return self.stretches[-1][0]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "stretches": [list(one) for one in self.stretches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The leader reads a checkpoint and begins a stretch; the others are told of it."""
        self.step = state["step"]
        self.stretches = [(mark, step) for mark, step in state["stretches"]]
        if self._run.is_main:
            self.stretches.append((uuid.uuid4().hex, self.step))


class Place:
    """The files of a job: what it saw, and the traps laid for it."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def write(self, **fields: Any) -> None:
        if self._folder is not None:
            line = json.dumps({"t_s": time.monotonic(), "pid": os.getpid(), **fields}) + "\n"
            file = os.open(self._folder / SEEN, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(file, line.encode())
            os.close(file)

    def spring(self) -> None:
        if self._folder is None:
            return
        if self._sprung(RAISE):
            raise RuntimeError("a trap that was laid for this step")
        if self._sprung(FLOOD):
            for number in range(FLOOD_LINES):
                sys.stdout.write(json.dumps({"step": number, "loss": 0.5}) + "\n")

    def _sprung(self, name: str) -> bool:
        assert self._folder is not None
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def poisoned(self, step: int) -> bool:
        try:
            return self._folder is not None and step == int((self._folder / POISON).read_text())
        except FileNotFoundError:
            return False


def train(config: dict[str, Any], run: Run) -> None:
    """As a worker, whose output goes to a file of its job's folder."""
    follow(config, run, Place(Path("/proc/self/fd/1").readlink().parent))


def follow(config: dict[str, Any], run: Run, place: Place, epochs: int = EPOCHS) -> list[float]:
    """Train, and return the loss after each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = Numbered()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model.register_buffer("ballast", torch.zeros(BALLAST, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    ledger = Ledger(run)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, scheduler, loader, ledger = run.prepare(model, optimizer, scheduler, loader, ledger)
    losses: list[float] = []
    for epoch in run.epochs(epochs):
        for x, y, index in loader:
            place.write(epoch=epoch, mark=ledger.mark, step=ledger.step, rank=run.rank, saw=index.tolist())
            place.spring()
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            torch.autograd.backward(loss * math.nan if place.poisoned(ledger.step) else loss)
            optimizer.step()
            ledger.step += 1
            time.sleep(config.get("nap_s", 0.0))
        scheduler.step()
        with torch.no_grad():
            losses.append(mse_loss(model(data.x), data.y).item())
        if run.is_main:
            place.write(ended=epoch + 1, stretches=ledger.stretches, step=ledger.step, loss=losses[-1])
        run.report(loss=losses[-1])
    return losses
