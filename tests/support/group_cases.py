"""Training code around elastic loops, for a gang; as a script, on the ranks that a launcher says."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stretto.core.errors import InputError
from stretto.torch import Run

EXAMPLES, BATCH = 64, 8


def data() -> TensorDataset:
    return TensorDataset(torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(3)))


def model_and_optimizer(*more: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), *more, torch.nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(model(x).square().mean())
    optimizer.step()


def weight(model: torch.nn.Module) -> float:
    return sum(float(one.detach().square().sum()) for one in model.parameters())


def train(config: dict[str, Any], run: Run) -> None:
    """Reports what it is told to, and something more in its first epoch."""
    torch.set_num_threads(1)
    scores = [float(score) for score in config.get("scores", "").split()]
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))
    state = run.keep(batches=0)
    for epoch in run.epochs(config["epochs"]):
        for (x,) in loader:
            step(model, optimizer, x)
            time.sleep(config["nap_s"])
            if run.is_main:
                state.batches += 1
        run.report(accuracy=scores[epoch] if scores else 0.5, batches=state.batches)
        if epoch == 0:
            run.report(rare=1.0)
        if epoch == config.get("last"):
            break


def ordinary_steps(_: Path) -> list[float]:
    """Each rank takes other examples, before and after an elastic loop."""
    run, weights = Run(), []
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))
    for _epoch in run.epochs(1):
        for loop in (DataLoader(data(), batch_size=4, shuffle=True), loader) * 2:
            for (x,) in loop:
                step(model, optimizer, x + run.rank)
            weights.append(weight(model))
    run.finish()
    return weights


def batch_statistics(_: Path) -> list[float]:
    run = Run()
    model, optimizer = model_and_optimizer(torch.nn.BatchNorm1d(3))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data(), batch_size=BATCH))
    seen: list[float] = []
    for _epoch in run.epochs(2):
        for (x,) in loader:
            step(model, optimizer, x)
        seen += [float(one.double().sum()) for one in model.buffers()]
    run.finish()
    return seen


def after_finish(_: Path) -> list[Any]:
    run = Run()
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))
    for _epoch in run.epochs(1):
        for (x,) in loader:
            step(model, optimizer, x)
    workers = run.mean(run.rank) * 2 + 1
    run.finish()
    step(model, optimizer, data().tensors[0])
    return [
        workers,
        weight(model),
        refused(lambda: run.mean(1.0)),
        refused(lambda: next(iter(run.epochs(2)))),
    ]


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except InputError as error:
        return str(error)
    return "not at all"


def users_group(_: Path) -> list[Any]:
    dist.init_process_group("gloo")
    run = Run()
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))
    for _epoch in run.epochs(1):
        for (x,) in loader:
            step(model, optimizer, x)
    run.finish()
    there = dist.is_initialized()
    dist.destroy_process_group()
    return [run.workers, there, weight(model)]


def wrapped(_: Path) -> list[Any]:
    """As code for several workers has it without us: everything is shared out and averaged already."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    given = DistributedDataParallel(model)
    examples = data()
    sampler: DistributedSampler[Any] = DistributedSampler(examples, seed=5)
    loader = DataLoader(examples, batch_size=12, sampler=sampler)  # the last batch has 4, the others 6 each
    run = Run()
    prepared, optimizer, elastic = run.prepare(given, optimizer, loader)
    seen: list[float] = []
    for epoch in run.epochs(1):
        sampler.set_epoch(epoch)
        for (x,) in elastic:
            step(prepared, optimizer, x)
            seen += x[:, 0].tolist()
    refusals = [refused(lambda: given(x)), refused(lambda: forgotten(model))]
    run.finish()
    dist.destroy_process_group()
    return [sorted(seen), weight(model), *refusals]


def forgotten(model: torch.nn.Module) -> None:
    """Only the optimizer is prepared, and the wrapper averages on."""
    wrapper = DistributedDataParallel(model)
    run = Run()
    run.prepare(torch.optim.SGD(wrapper.parameters(), lr=0.1), DataLoader(data(), batch_size=BATCH))
    next(iter(run.epochs(1)))


def stopped_early(folder: Path) -> int:
    """Nobody leaves this group before the script ends."""
    run = Run(folder)
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))
    for epoch in run.epochs(9):
        for (x,) in loader:
            step(model, optimizer, x)
        run.report(loss=1.0)
        if epoch == 1:
            break
    return int(run.mean(run.workers))


CASES = (ordinary_steps, batch_statistics, after_finish, users_group, wrapped, stopped_early)


def main(folder: Path) -> None:
    seen: dict[str, Any] = {}

    @atexit.register
    def tell() -> None:
        sys.stdout.write(json.dumps(seen | {"group_at_exit": dist.is_initialized()}))

    for case in CASES:
        meet_at_a_new_port(folder.with_name(f"{folder.name}-{case.__name__}"))
        seen[case.__name__] = case(folder)


def meet_at_a_new_port(file: Path) -> None:
    """Whoever is the first to form the next group would meet the one before at the same port."""
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            unfinished = file.with_suffix(".new")
            unfinished.write_text(str(free.getsockname()[1]))
        unfinished.replace(file)
    while not file.exists():
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = file.read_text()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
