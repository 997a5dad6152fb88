"""The handle that training code holds, used by hand in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stretto.core.errors import InputError
from stretto.torch import Run

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2))


class Noisy(Dataset[float]):
    """Every look at an example is another."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def take_steps(
    run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any, epochs: int
) -> None:
    for _ in run.epochs(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()


def test_what_is_prepared_is_what_was_given() -> None:
    model, optimizer = model_and_optimizer()
    run = Run()
    prepared = run.prepare(model, optimizer)
    assert prepared == (model, optimizer)
    assert (
        run.prepare(torch.nn.Linear(1, 1), lambda m: torch.optim.SGD(m.parameters(), lr=1))[1].defaults["lr"]
        == 1
    )


@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_may_be_made_before_or_after(before: bool) -> None:
    model, optimizer = model_and_optimizer()
    run = Run()
    kind = torch.optim.lr_scheduler.StepLR
    scheduler = kind(optimizer, 1, 0.5) if before else None
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(DATA, batch_size=5))
    scheduler = scheduler or kind(optimizer, 1, 0.5)
    run.prepare(scheduler)
    for _ in run.epochs(2):
        for (x,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).mean())
            optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)


def test_preparing_more_later_leaves_the_batch_adaptive() -> None:
    model, optimizer = model_and_optimizer()
    run = Run()
    run.prepare(model, optimizer, DataLoader(DATA, batch_size=5), adaptive=True, max_batch_size=20)
    run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert run._engine.batching.adaptive


def test_a_rate_that_is_a_tensor_comes_back_as_it_was() -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    run = Run()
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(DATA, batch_size=2), adaptive=True, lr_rule="linear", max_batch_size=4
    )
    run._engine.batching._own = run._engine.batching.order = None
    stepper = run._engine.steppers[0]
    stepper._initial_batch = 1  # as if every step were at twice the initial batch
    take_steps(run, model, optimizer, loader, 1)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_random_transforms_draw_other_numbers_in_every_epoch() -> None:
    run = Run()
    loader = run.prepare(DataLoader(Noisy(), batch_size=8, num_workers=1))
    seen = [tuple(batch.tolist()) for _ in run.epochs(3) for batch in loader]
    assert len(set(seen)) == 3


def test_parameters_that_are_thawed_are_averaged_from_the_next_epoch_on() -> None:
    model, optimizer = model_and_optimizer()
    first = model[0].weight  # type: ignore[index]
    first.requires_grad_(False)
    run = Run()
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(DATA, batch_size=4), per_worker_batch=(1, 2)
    )
    reducer = run._engine.steppers[0].reducer
    for epoch in run.epochs(2):
        assert (first in set(reducer._parameters)) == (epoch == 1)
        for (x,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).mean())
            optimizer.step()
        first.requires_grad_(True)


def test_names_that_every_line_has_are_refused() -> None:
    with pytest.raises(InputError, match="epoch"):
        Run().report(epoch=1, accuracy=0.5)


@pytest.mark.parametrize("value", ["high", None, torch.zeros(2)])
def test_what_is_no_number_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(InputError, match=r"accuracy=.* is not a number"):
        Run().report(accuracy=value)


def test_what_cannot_be_prepared_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be prepared"):
        Run().prepare("a model")
    with pytest.raises(InputError, match="lr_rule"):
        Run().prepare(torch.nn.Linear(1, 1), lr_rule="cubic")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="adaptive"):
        Run().prepare(torch.nn.Linear(1, 1), max_batch_size=4)


@pytest.mark.parametrize(
    ("bounds", "rule"),
    [
        ({"max_batch_size": -1}, "max_batch_size is -1"),
        ({"max_batch_size": "big"}, "max_batch_size is 'big'"),
        ({"max_batch_size": 2}, "max_batch_size 2 is below the batch size 4"),
        ({"per_worker_batch": (8, 16)}, "per_worker_batch begins at 8, above the batch size 4"),
        ({"per_worker_batch": (3, 2)}, "per_worker_batch is"),
    ],
)
def test_bounds_that_nothing_keeps_are_refused_at_once(bounds: dict[str, Any], rule: str) -> None:
    run, model = Run(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=rule):
        run.prepare(model, optimizer, DataLoader(DATA, batch_size=4), adaptive=True, **bounds)


def test_a_loader_of_the_runs_own_may_be_prepared_too() -> None:
    """An adaptive run needs its loader and its optimizer together."""
    run, model = Run(), torch.nn.Linear(2, 1)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), run.loader(DATA, batch_size=4)
    assert run.prepare(model, optimizer, loader, adaptive=True, max_batch_size=8)[2] is loader
    with pytest.raises(InputError, match="max_batch_size 2 is below the batch size 4"):
        Run().prepare(model, optimizer, loader, adaptive=True, max_batch_size=2)


def test_the_batch_size_is_known_before_the_first_loop() -> None:
    run = Run()
    run.prepare(torch.nn.Linear(2, 1), DataLoader(DATA, batch_size=4))
    assert run.batch_size == 4
    epochs = run.epochs(1)
    next(epochs)
    assert run.batch_size == 4


def test_an_elastic_loader_belongs_into_an_epoch() -> None:
    run = Run()
    loader = run.loader(DATA, batch_size=4)
    with pytest.raises(InputError, match=r"run\.epochs"):
        next(iter(loader))
