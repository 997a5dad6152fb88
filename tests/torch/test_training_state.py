"""What code keeps of its own, how it counts, and what workers compare: without other workers."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.core.errors import InputError
from stretto.torch import Run
from stretto.torch.fingerprint import COST, DivergenceCheck, Fingerprint, difference, fingerprint, interval
from stretto.torch.foreign import StepGuard
from stretto.torch.group import Group
from stretto.torch.state import KeptValues
from stretto.torch.step_layout import CurrentStep, StepLayout
from stretto.torch.stepper import Stepper


@pytest.mark.parametrize(
    "value",
    [
        3,
        2.5,
        math.nan,
        10**30,
        None,
        "text",
        b"bytes",
        [1, (2, "x")],
        {"a": {1: 2.0}},
        OrderedDict(a=1),
        np.float64(0.5),
        torch.ones(3, requires_grad=True),
        [torch.zeros(2, dtype=torch.bfloat16)],
    ],
)
def test_what_a_checkpoint_can_hold_is_kept(tmp_path: Path, value: Any) -> None:
    for go in range(2):
        run = Run(tmp_path)
        model = run.prepare(nn.Linear(1, 1))
        state = run.keep(value=None)
        loader = run.loader(TensorDataset(torch.ones(4, 1)), 2)
        for _ in run.epochs(go + 1):
            kept = state.value
            state.value = value
            for (x,) in loader:
                model(x)
        run.finish()
    assert str(kept) == str(value.detach() if isinstance(value, torch.Tensor) else value)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.zeros(2), len, [lambda: 0], nn.Linear(1, 1), [10**5000], Path("x"), 1 + 2j]
)
def test_what_a_checkpoint_cannot_hold_is_refused_at_once(value: Any) -> None:
    run = Run()
    with pytest.raises(InputError, match=rf"^best is of type {type(value).__name__}, which a checkpoint"):
        run.keep(best=value)
    state = run.keep(best=0.0)
    with pytest.raises(InputError, match=rf"^best is of type {type(value).__name__}, .* run\.prepare\(\)"):
        state.best = value
    assert state.best == 0.0


def test_what_is_changed_in_place_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    run = Run(tmp_path)
    state = run.keep(history=[1.0])
    state.history.append(object())
    for _ in run.epochs(1):
        with pytest.raises(InputError, match=r"^history is of type list, which a checkpoint cannot hold \("):
            run._engine._save(wait=True)
        state.history.pop()


def test_values_of_the_leader_replace_those_that_differ() -> None:
    own, leaders = KeptValues(), KeptValues()
    history, seen = [1.0, math.nan], torch.ones(2)
    own.add({"best": 0.0, "history": history, "seen": seen, "only_here": 1})
    leaders.add({"best": 0.5, "history": [1.0, math.nan], "seen": torch.ones(2), "only_there": 2})
    assert own.digest() != leaders.digest()
    own.take(leaders.state_dict())
    assert own.values == {"best": 0.5, "history": history, "seen": seen, "only_here": 1}
    assert own.get("history") is history
    assert own.get("seen") is seen
    leaders.get("seen")[1] = 2.0
    own.take(leaders.state_dict())
    assert own.get("seen").tolist() == [1.0, 2.0]


def test_names_that_are_not_kept_are_refused() -> None:
    run = Run()
    state = run.keep(patience=3)
    with pytest.raises(InputError, match=r"Did you mean patience\?"):
        state.patiense = 2
    with pytest.raises(AttributeError, match="patience"):
        _ = state.patiense
    with pytest.raises(InputError, match="kept already"):
        run.keep(patience=4)
    with pytest.raises(InputError, match="underscore"):
        run.keep(_values=4)
    assert repr(copy.copy(state)) == "Kept(patience=3)"
    for _ in run.epochs(1):
        with pytest.raises(InputError, match="after training has begun"):
            run.keep(more=1)


def test_older_checkpoints_have_no_kept_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    engine = run._engine
    saved = engine.state()
    for name in ("kept", "updates", "counting"):
        del saved[name]
    engine.current.step = 7
    saved["step"] = 7
    engine._persistence.save(lambda: saved, 1.0, wait=True)
    again = Run(tmp_path)
    state = again.keep(best=0.5)
    assert list(again.epochs(2)) == [0, 1]
    assert (state.best, again.step) == (0.5, 7)
    assert "no best: the initial value is used" in capsys.readouterr().out


def sgd(run: Run) -> Any:
    model = nn.Linear(1, 1)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 1)).mean().backward()
    optimizer.step()


def test_progress_and_steps_of_epochs() -> None:
    run = Run()
    model, optimizer = sgd(run)
    checks, loader = (run.loader(TensorDataset(torch.ones(8, 1)), 2) for _ in range(2))
    seen = [(run.step, run.progress)]
    for _ in run.epochs(2):
        for _ in loader:
            make_step(model, optimizer)
            seen.append((run.step, run.progress))
        for _ in checks:
            model(torch.ones(1, 1))
    seen.append((run.step, run.progress))
    assert seen == [(0, 0.0), *((step, step / 8) for step in range(8)), (8, 1.0)]


def test_steps_without_a_loader_count_too() -> None:
    run = Run()
    model, optimizer = sgd(run)
    for _ in run.epochs(3):
        make_step(model, optimizer)
        make_step(model, optimizer)
    assert (run.step, run.progress) == (6, 1.0)


def test_a_result_without_a_loader_is_kept(tmp_path: Path) -> None:
    for epochs in (2, 3):
        run = Run(tmp_path)
        model, optimizer = sgd(run)
        numbers = []
        for epoch in run.epochs(epochs):
            numbers.append(epoch)
            make_step(model, optimizer)
        run.finish()
    assert numbers == [2]


def test_counted_steps_may_be_split_and_left_and_made_more(tmp_path: Path) -> None:
    made, shares, due = [], [], []
    for count, left_at in ((25, 13), (25, None), (32, None)):
        run = Run(tmp_path)
        model, optimizer = run.prepare(
            first := nn.Linear(1, 1), torch.optim.SGD(first.parameters(), lr=0.1), per_worker_batch=(1, 3)
        )
        for step in run.steps(count, batch_size=5, report_every=10):
            shares.append(run.share)
            make_step(model, optimizer)
            made += [step] if run.step_is_complete else []
            due += [step] if run.report_is_due else []
            if step == left_at and run.step_is_complete:
                break
        run.finish()
    assert made == [*range(14), *range(13, 32)]  # of the step that was left it is not known whether it counts
    assert set(shares) == {2, 3}
    assert due == [9, 19, 24, 31]
    assert (run.step, run.progress) == (32, 1.0)


def test_gradients_that_wait_count_as_much_after_a_restart(tmp_path: Path) -> None:
    def trained(folder: Path | None, left_at: int | None = None) -> list[float]:
        torch.manual_seed(0)
        run = Run(folder)
        first = nn.Linear(1, 1)
        model, optimizer = run.prepare(
            first, torch.optim.SGD(first.parameters(), lr=0.1), per_worker_batch=(1, 1)
        )
        for step in run.steps(4, batch_size=2, report_every=4):
            if step == left_at:
                break
            model(torch.full((1, 1), float(run.examples[0]))).square().mean().backward()
            if step % 2:
                optimizer.step()
                if run.step_is_complete:
                    optimizer.zero_grad()
        run.finish()
        return [one.item() for one in model.parameters()]

    trained(tmp_path, left_at=1)
    assert trained(tmp_path) == pytest.approx(trained(None), rel=1e-6)


def test_steps_before_the_loop_are_not_counted() -> None:
    run = Run()
    model, optimizer = sgd(run)
    make_step(model, optimizer)
    seen = []
    for step in run.steps(5, batch_size=2):
        seen.append(step)
        make_step(model, optimizer)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("steps_before", [False, True])
def test_counted_steps_without_a_step_of_the_optimizer_are_no_result(
    tmp_path: Path, steps_before: bool
) -> None:
    run = Run(tmp_path)
    model, optimizer = sgd(run)
    if steps_before:
        make_step(model, optimizer)
    with pytest.raises(InputError, match=r"nothing was trained: 10 batches .* was never called"):
        list(run.steps(10, batch_size=2))
    run.finish_saving()
    assert not list(tmp_path.rglob("state.pt"))


def test_loops_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size=0"):
        Run().steps(10, batch_size=0)
    run = Run()
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    model, optimizer = sgd(run)
    loader = run.prepare(loader)
    for _ in run.steps(1, batch_size=2):
        make_step(model, optimizer)
        with pytest.raises(InputError, match="inside `for step in run"):
            next(iter(loader))
    with pytest.raises(InputError, match=r"run\.epochs\(\) was called after"):
        next(iter(run.epochs(1)))
    with pytest.raises(InputError, match=r"run\.share is known only inside"):
        _ = run.share
    adaptive = Run()
    model = nn.Linear(1, 1)
    adaptive.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2),
        adaptive=True,
    )
    with pytest.raises(InputError, match="adaptive=True"):
        adaptive.steps(10, batch_size=2)
    first = Run(tmp_path)
    model, optimizer = sgd(first)
    for _ in first.steps(10, batch_size=2):
        make_step(model, optimizer)
    first.finish()
    again = Run(tmp_path)
    sgd(again)
    with pytest.raises(InputError, match=r"report_every=1\), but this code loops over .*report_every=2\)"):
        next(iter(again.steps(20, batch_size=2)))


def of(*optimizers: torch.optim.Optimizer, turn: int = 0) -> Fingerprint:
    return fingerprint(optimizers, turn)


def adam(lr: Any = 0.1, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Adam:
    parameters = [nn.Parameter(torch.linspace(-1, 1, 300, dtype=dtype)), nn.Parameter(torch.zeros(0))]
    return torch.optim.Adam(parameters, lr=lr, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_equal_workers_have_equal_fingerprints(dtype: torch.dtype) -> None:
    one, other = of(adam(dtype=dtype)), of(adam(dtype=dtype))
    assert one.digests() == other.digests()
    assert difference([one, other], ["w", "b"]) is None


def test_a_rate_may_be_a_tensor() -> None:
    rates = [torch.tensor(0.25), torch.tensor(0.5)]
    problem = difference([of(adam(rate, capturable=True)) for rate in rates], ["w", "b"])
    assert problem is not None
    assert problem.text == "learning rate of group 0: 0.25 on rank 0, 0.5 on rank 1"


def test_the_setting_that_differs_is_named() -> None:
    alike = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    workers = [of(alike, adam(betas=betas)) for betas in ((0.9, 0.95), (0.9, 0.99), (0.9, 0.95))]
    problem = difference(workers, ["w", "b", "c"])
    assert problem is not None
    assert problem.text == (
        "betas of group 0 of optimizer 1 (Adam): (0.9, 0.95) on ranks 0 and 2, (0.9, 0.99) on rank 1"
    )


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1 + 1e-6), (torch.bfloat16, 1 + 1e-2)])
def test_rounding_is_no_difference(dtype: torch.dtype, factor: float) -> None:
    one, other = adam(dtype=dtype), adam(dtype=dtype)
    with torch.no_grad():
        other.param_groups[0]["params"][0].mul_(factor)
    assert of(one).digests() != of(other).digests()
    assert difference([of(one), of(other)], ["w", "b"]) is None


@pytest.mark.parametrize("change", [0.01, math.nan, math.inf])
def test_a_single_weight_is_found_as_turns_go_by(change: float) -> None:
    one, other = adam(), adam()
    with torch.no_grad():
        other.param_groups[0]["params"][0][7] += change
    found = [difference([of(one, turn=turn), of(other, turn=turn)], ["w", "b"]) for turn in range(4)]
    (problem,) = [problem for problem in found if problem is not None]
    assert problem.text.startswith("a value of parameter w: ")


class OtherRounding(Group):
    """A second worker whose parameters differ by rounding only."""

    def __init__(self) -> None:
        super().__init__()
        self.world = 2
        self.given = b""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[*numbers], [numbers[0], numbers[1] + 1, numbers[2]]]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        self.given = content
        return [content, content]


def test_a_closer_look_exchanges_samples_and_not_whole_parameters() -> None:
    group, turn = OtherRounding(), CurrentStep(StepLayout(total=1), StepLayout(total=1))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1_000_000)) for _ in range(2)], lr=0.1)
    DivergenceCheck(group, turn, [Stepper(optimizer, turn, group)], dict).regrouped()
    assert 0 < len(group.given) < 20_000


def test_comparing_takes_a_thousandth_of_the_time_at_most() -> None:
    for cost_s, step_s in ((1e-3, 1e-4), (5e-4, 0.2), (0.03, 0.1)):
        assert cost_s / (interval(cost_s, step_s) * step_s) <= COST <= 0.001
    assert interval(1e-6, 10.0) == 1


def test_an_optimizer_whose_model_is_not_prepared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    run = Run()
    run.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(InputError, match="2 of the 2 parameters of the SGD belong to no model"):
        next(iter(run.epochs(1)))


@pytest.mark.parametrize("prepares_model", [True, False])
def test_an_optimizer_that_is_not_prepared_may_not_train(prepares_model: bool) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    guard = StepGuard(lambda: [model] if prepares_model else [], lambda: True)
    guard.begin()
    try:
        with pytest.raises(InputError, match=r"was not given to run\.prepare\(\), so every worker"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        if prepares_model:
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    finally:
        guard.end()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
