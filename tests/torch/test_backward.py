"""Gradients that come in unusual ways are those of one worker that makes one pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch.utils.data import DataLoader, TensorDataset

import backward_cases
from backward_cases import BATCH, CASES, trained
from ranks import launched
from stretto.core.errors import InputError
from stretto.torch import Run


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, list[float]]]:
    """What each of two workers, launched as torchrun does, has trained in every case."""
    return [json.loads(worker.last_line) for worker in launched(backward_cases.__file__)]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("passes", [2, 3])
def test_passes_do_not_change_the_result(name: str, passes: int) -> None:
    alone = trained(CASES[name], {})
    assert trained(CASES[name], {"per_worker_batch": (1, -(-BATCH // passes))}) == pytest.approx(
        alone, rel=1e-4
    )


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_workers_do_not_change_the_result(name: str, on_ranks: list[dict[str, list[float]]]) -> None:
    alone = trained(CASES[name], {})
    for rank in on_ranks:
        assert rank[name] == pytest.approx(alone, rel=1e-4)


def test_workers_stay_alike_whoever_uses_what(on_ranks: list[dict[str, list[float]]]) -> None:
    first, second = (rank["unused_on_some_ranks"] for rank in on_ranks)
    assert first == second


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")])
def test_players_whose_steps_a_scaler_makes(scaler: torch.amp.GradScaler) -> None:
    def train(per_worker: int) -> list[float]:
        torch.manual_seed(0)
        run = Run()
        judge, judges = backward_cases.linear()
        maker, makes = backward_cases.made(torch.nn.Linear(4, 4), lr=0.0)
        for x in backward_cases.batches(
            run, judge, judges, maker, makes, scaler, per_worker_batch=(1, per_worker)
        ):
            judges.zero_grad()
            scaler.scale(judge(x).square().mean() - judge(maker(x).detach()).mean()).backward()
            scaler.step(judges)
            makes.zero_grad()
            scaler.scale(judge(maker(x)).square().mean()).backward()
            scaler.step(makes)
            scaler.update()
        return backward_cases.numbers(judge)

    assert train(BATCH // 2) == pytest.approx(train(BATCH), rel=1e-3)


def test_a_scaler_that_is_off_does_not_stop_adaptive_runs() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model, optimizer = backward_cases.linear()
    for x in backward_cases.batches(Run(), model, optimizer, scaler, adaptive=True):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)


def test_sparse_gradients_are_refused_in_words() -> None:
    layer = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(layer.parameters()))
    data = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    run = Run()
    layer, optimizer, data = run.prepare(layer, optimizer, data, per_worker_batch=(1, 2))
    for _ in run.epochs(1):
        batches = iter(data)
        index = next(batches)[0]
        with pytest.raises(InputError, match=r"shape \(10, 4\) has a sparse gradient.*sparse=False"):
            layer(index).sum().backward()


def test_what_a_step_is_given_reaches_the_optimizer() -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: object = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
            assert closure is None
            scales.append(scale)

    scales: list[float] = []
    model, _ = backward_cases.linear()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
    optimizer = Scaled(groups, lr=0.1)
    for x in backward_cases.batches(Run(), model, optimizer, adaptive=True):
        model(x).mean().backward()
        optimizer.step(None, scale=0.5)
    assert set(scales) == {0.5}
