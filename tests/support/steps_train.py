"""Training scripts for tests that count steps and draw their own data, the way nanoGPT does."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from stretto.torch import Run

EXAMPLES, BATCH = 300, 12
STEPS, REPORT_EVERY = 90, 15


def rate(step: int) -> float:
    """Warm-up, then a cosine."""
    warm = min((step + 1) / 20, 1.0)
    return 0.02 * warm * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 20, generator=generator)
    return x, (x[:, 0] > 0).long()


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


def note(config: dict[str, Any], *row: object) -> None:
    with Path(config["seen"]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def train(config: dict[str, Any], run: Run) -> None:
    torch.set_num_threads(1)
    x, y = data()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    state = run.keep(best=math.inf, improved=[])
    for step in run.steps(STEPS, batch_size=BATCH, report_every=REPORT_EVERY):
        for group in optimizer.param_groups:
            group["lr"] = rate(run.step)
        rows = [number * 7 % EXAMPLES for number in run.examples]
        assert len(rows) == run.share
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        note(config, step, run.rank, run.workers, list(run.examples), run.progress)
        if run.report_is_due:
            loss = float(cross_entropy(model(x), y))
            if loss < state.best:
                state.best = loss
                state.improved = [*state.improved, step]
            run.report(loss=loss, best=state.best, improved=len(state.improved))
        time.sleep(config.get("nap_s", 0.0))
    if run.is_main:
        note(config, "end", run.step, run.progress, state.best)


def counts_itself(config: dict[str, Any], run: Run) -> None:
    """Wrong: a newcomer's own counter begins at 0."""
    torch.set_num_threads(1)
    x, y = data()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    iter_num = 0
    for _ in run.epochs(200):
        for _ in range(REPORT_EVERY):
            for group in optimizer.param_groups:
                group["lr"] = rate(iter_num % STEPS)
            rows = torch.randint(EXAMPLES, (BATCH,))
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            iter_num += 1
            note(config, iter_num, run.rank, run.workers)
            time.sleep(config.get("nap_s", 0.0))
        run.report(loss=1.0)


def changes_weights(config: dict[str, Any], run: Run) -> None:
    """Wrong in another way: rank 0 alone changes a weight, and the exception is caught."""
    torch.set_num_threads(1)
    x, y = data()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(100_000, batch_size=BATCH, report_every=1000):
        optimizer.zero_grad()
        rows = [number % EXAMPLES for number in run.examples]
        try:
            cross_entropy(model(x[rows]), y[rows]).backward()
        except Exception:  # noqa: BLE001 - as people write it
            note(config, "caught", run.rank)
        optimizer.step()
        if run.workers > 1 and run.is_main:
            with torch.no_grad():
                model[0].bias.mul_(1.1)
        note(config, step, run.rank, run.workers)


def draws_own_batches(config: dict[str, Any], run: Run) -> None:
    """Epochs without an elastic loader, as a script that was not ported has them."""
    del config
    x, y = data()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    for _ in run.epochs(10_000):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
