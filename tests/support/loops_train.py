"""Training scripts for tests whose loops are not the plain one, and which write down what they see.

`train` has two elastic loops an epoch; `accumulate` steps with every fourth batch, by hand;
`together` takes the batches of two loaders for each step.
"""

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


ACCUMULATED = 4
"""Batches of a step: an epoch has ten, so the last two are left over."""


def steps_now(form: str, index: int, counter: int, length: int) -> bool:
    """Whether the optimizer steps with this batch."""
    match form:
        case "first":
            return index % ACCUMULATED == 0
        case "last" | "length":
            return (index + 1) % ACCUMULATED == 0 or index + 1 == length
        case "counter":
            return counter % ACCUMULATED == 0
    return (index + 1) % ACCUMULATED == 0


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TRAINED, 6, generator=generator)
    return x, x.square().mean(1, keepdim=True) + 0.1 * torch.randn(TRAINED, 1, generator=generator)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def write_down(config: dict[str, Any], *values: Any) -> None:
    with Path(config["seen"]).open("a") as file:
        file.write(json.dumps(values) + "\n")


def accumulate(config: dict[str, Any], run: Run) -> None:
    torch.set_num_threads(1)
    x, y = regression()
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = TensorDataset(x, y, torch.arange(TRAINED))
    loader = DataLoader(data, batch_size=24, shuffle=True)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    form, counter, length = config["form"], 0, len(loader)
    for epoch in run.epochs(config["epochs"]):
        counter += run.rank * config.get("ahead", 0)
        for index, (a, b, numbers) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(a), b)
            torch.autograd.backward(loss / ACCUMULATED if form == "divided" else loss)
            counter += 1
            if form == "print" and run.is_main and index == 0:
                write_down(config, epoch, "length", run.workers, [len(loader)])
            if steps_now(form, index, counter, len(loader) if form == "last" else length):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            write_down(config, epoch, "train", run.workers, numbers.tolist())
            time.sleep(config.get("nap_s", 0.0))
        with torch.no_grad():
            run.report(loss=torch.nn.functional.mse_loss(model(x), y).item())


BESIDE = {"zip": (TRAINED, 24), "shorter": (135, 24), "longer": (300, 24), "sizes": (TRAINED, 10)}
"""Examples and batch size of the second loader; otherwise 60 examples, again and again."""


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def pairs(form: str, first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    if form in BESIDE:
        yield from zip(first, second, strict=False)
    elif form == "forever":
        yield from zip(first, forever(second), strict=False)
    else:
        others = iter(second)
        for one in first:
            try:
                other = next(others)
            except StopIteration:
                others = iter(second)
                other = next(others)
            yield one, other


def together(config: dict[str, Any], run: Run) -> None:
    torch.set_num_threads(1)
    x, y = regression()
    model, optimizer = model_and_optimizer()
    form = config["form"]
    examples, batch_size = BESIDE.get(form, (60, 24))
    more = torch.randn(examples, 6, generator=torch.Generator().manual_seed(9))
    data = TensorDataset(x, y, torch.arange(TRAINED))
    others = TensorDataset(more, torch.arange(examples))
    loading: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if config.get("loads") else {}
    model, optimizer, first, second = run.prepare(
        model,
        optimizer,
        DataLoader(data, batch_size=24, shuffle=True, **loading),
        DataLoader(others, batch_size=batch_size, shuffle=True, **loading),
    )
    for epoch in run.epochs(config["epochs"]):
        for (a, b, numbers), (c, other_numbers) in pairs(form, first, second):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(a), b) + 0.1 * model(c).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            write_down(config, epoch, "train", run.workers, numbers.tolist())
            write_down(config, epoch, "beside", run.workers, other_numbers.tolist())
            time.sleep(config.get("nap_s", 0.0))
        with torch.no_grad():
            run.report(loss=torch.nn.functional.mse_loss(model(x), y).item(), steps=run.step)


LOOPS = {"accumulate": accumulate, "together": together}


def loop(config: dict[str, Any], run: Run) -> None:
    """The one that the configuration names, in one of its forms."""
    LOOPS[config["loop"]](config, run)
