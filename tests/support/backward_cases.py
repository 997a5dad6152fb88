"""Training code whose gradients come in unusual ways; as a script, on the ranks that a launcher says.

Each case trains a few steps and gives numbers that depend on everything that was trained. With the same
batches they are the same for any number of workers and passes, and on every worker.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

EXAMPLES, BATCH = 32, 8
Made = tuple[torch.nn.Sequential, torch.optim.Optimizer]
Share = dict[str, Any]


def made(*layers: torch.nn.Module, lr: float = 0.1) -> Made:
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.1)


def linear() -> Made:
    return made(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))


def batches(run: Run, *things: Any, **how: Any) -> Iterator[torch.Tensor]:
    """Of two epochs, each with the same examples in the same places."""
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(EXAMPLES, 4, generator=generator))
    *_, loader = run.prepare(*things, DataLoader(data, batch_size=BATCH), **how)
    for _ in run.epochs(2):
        for (x,) in loader:
            yield x


def numbers(*models: torch.nn.Module) -> list[float]:
    return [float(one.detach().square().sum()) for model in models for one in model.parameters()]


def one_backward(run: Run, how: Share) -> list[float]:
    model, optimizer = linear()
    for x in batches(run, model, optimizer, **how):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return numbers(model)


def zeroed_in_place(run: Run, how: Share) -> list[float]:
    model, optimizer = linear()
    for x in batches(run, model, optimizer, **how):
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()
    return numbers(model)


def two_backwards(run: Run, how: Share) -> list[float]:
    model, optimizer = linear()
    for x in batches(run, model, optimizer, **how):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        model(2 * x).abs().mean().backward()
        optimizer.step()
    return numbers(model)


def two_players(run: Run, how: Share) -> list[float]:
    """As in a GAN, the second one's loss reaches the first one's parameters after its step."""
    (judge, judges), (maker, makes) = linear(), made(torch.nn.Linear(4, 4), lr=0.0)
    for x in batches(run, judge, judges, maker, makes, **how):
        judges.zero_grad()
        (judge(x).square().mean() - judge(maker(x).detach()).mean()).backward()
        judges.step()
        makes.zero_grad()
        judge(maker(x)).square().mean().backward()
        makes.step()
    return numbers(judge)


def checkpointed(run: Run, how: Share) -> list[float]:
    """Backward passes within a backward pass."""
    model, optimizer = made(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
    )
    first, *middle, last = model
    for x in batches(run, model, optimizer, **how):
        optimizer.zero_grad()
        inner = checkpoint(torch.nn.Sequential(*middle), first(x), use_reentrant=True)
        last(inner).square().mean().backward()
        optimizer.step()
    return numbers(model)


def own_accumulation(run: Run, how: Share) -> list[float]:
    """Every second step only, with the gradients of two."""
    model, optimizer = linear()
    done = -1
    for x in batches(run, model, optimizer, **how):
        model(x).square().mean().backward()
        step = run._engine.current.step  # which goes on where run.step_is_complete
        assert run.step_is_complete is run._engine.current.share.last
        if step % 2:
            optimizer.step()
            if run.step_is_complete:
                optimizer.zero_grad()
        done = step
    assert done % 2
    return numbers(model)


def graph_kept(run: Run, how: Share) -> list[float]:
    model, optimizer = linear()
    for x in batches(run, model, optimizer, **how):
        optimizer.zero_grad()
        with contextlib.redirect_stderr(io.StringIO()):
            model(x).square().mean().backward(create_graph=True)
        optimizer.step()
    optimizer.zero_grad()
    return numbers(model)


def thawed(run: Run, how: Share) -> list[float]:
    """A layer that is trained from the third step on."""
    model, optimizer = linear()
    model[0].requires_grad_(False)
    for x in batches(run, model, optimizer, **how):
        if run._engine.current.step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return numbers(model)


CASES: dict[str, Callable[[Run, Share], list[float]]] = {
    case.__name__: case
    for case in (
        one_backward,
        zeroed_in_place,
        two_backwards,
        two_players,
        checkpointed,
        own_accumulation,
        graph_kept,
        thawed,
    )
}


def unused_on_some_ranks(run: Run) -> list[float]:
    """Two optimizers; only rank 0 uses a layer of the first, whose gradient is 0 all the same."""
    (one, _), (two, steps_two), (gate, _) = linear(), made(torch.nn.Linear(4, 4)), made(torch.nn.Linear(4, 1))
    both = torch.nn.ModuleList([gate, one])
    steps_both = torch.optim.SGD(both.parameters(), lr=0.1, weight_decay=0.1)
    for x in batches(run, both, steps_both, two, steps_two):
        steps_both.zero_grad()
        steps_two.zero_grad()
        loss = one(two(x)).square().mean()
        if run.rank == 0:
            loss = loss + 0.0 * gate(x).mean()
        loss.backward()
        steps_both.step()
        steps_two.step()
    return numbers(both, two)


def trained(case: Callable[..., list[float]], *how: Share) -> list[float]:
    torch.manual_seed(0)
    run = Run()
    found = case(run, *how)
    run.finish()
    return found


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    found = {name: trained(case, {}) for name, case in CASES.items()}
    found["unused_on_some_ranks"] = trained(unused_on_some_ranks)
    torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(found))
