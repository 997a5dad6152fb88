"""Loops that are not the plain one: accumulation by hand, two loaders at once, iterators by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import loops_train
from stretto.core.errors import InputError
from stretto.torch import Run
from stretto.wire.messages import Failed, Finished, Left, Park
from torch_gang import Cradle, Gang

EPOCHS = 4
CASES = [
    *(("accumulate", form) for form in ("print", "divided", "last", "length", "counter", "first")),
    *(("together", form) for form in ("zip", "shorter", "sizes", "forever", "next")),
]


@pytest.fixture(scope="module")
def cradle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    entry = f"{Path(loops_train.__file__)}:loop"
    with Cradle(entry, tmp_path_factory.mktemp("cradle")) as cradle:
        yield cradle


def undisturbed(config: dict[str, Any]) -> list[dict[str, float]]:
    """What one worker reports, by hand."""
    reported: list[dict[str, float]] = []

    class Told(Run):
        def report(self, **values: float) -> None:
            reported.append(values)

    loops_train.loop(config, Told(seed=1))
    return reported


def seen(config: dict[str, Any], name: str) -> dict[int, list[int]]:
    """The examples of every epoch."""
    by_epoch: dict[int, list[int]] = {}
    for line in Path(config["seen"]).read_text().splitlines():
        epoch, loop, _, some = json.loads(line)
        if loop == name:
            by_epoch.setdefault(epoch, []).extend(some)
    return {epoch: sorted(some) for epoch, some in by_epoch.items()}


@pytest.mark.parametrize(("loop", "form"), CASES)
def test_loops_of_every_form_survive_resizes(cradle: Cradle, tmp_path: Path, loop: str, form: str) -> None:
    alone: dict[str, Any] = {"loop": loop, "form": form, "epochs": EPOCHS, "seen": str(tmp_path / "alone")}
    config = alone | {"seen": str(tmp_path / "seen"), "nap_s": 0.01, "loads": form == "forever"}
    with Gang(cradle, tmp_path / "a", config=config) as gang:
        last = resize(gang, kept=form != "counter")
        gang.wait(last, Finished)
        ends = gang.epoch_ends()
    expected = undisturbed(alone)
    for name in expected[0]:
        reported = [ends[epoch + 1].values[name] for epoch in range(EPOCHS)]
        assert reported == pytest.approx([one[name] for one in expected], rel=1e-5)
    assert seen(config, "train") == seen(alone, "train")
    if form == "sizes":  # three workers cannot cut both batches in the same proportions
        assert {epoch: set(some) for epoch, some in seen(config, "beside").items()} == {
            epoch: set(some) for epoch, some in seen(alone, "beside").items()
        }
    elif form != "shorter":
        assert seen(config, "beside") == seen(alone, "beside")


def resize(gang: Gang, *, kept: bool) -> str:
    """Workers come and go, the leader too; who trains last. A counter that is not kept ends with its run."""
    for name in ("w0", "w1", "w2"):
        gang.spawn(name)
    gang.form("w0")
    gang.form("w0", "w1", "w2")
    gang.form("w1", "w2")
    if not kept:
        return "w1"
    gang.tell("w1", Park())
    assert gang.wait("w1", Left).saved
    gang.trained.clear()
    gang.spawn("w3")
    gang.form("w3")
    return "w3"


def test_workers_that_step_with_other_batches_stop_and_say_so(cradle: Cradle, tmp_path: Path) -> None:
    """One worker counts two batches more."""
    config = {"loop": "accumulate", "form": "counter", "epochs": 50, "seen": str(tmp_path / "seen")}
    with Gang(cradle, tmp_path / "a", config=config | {"ahead": 2}) as gang:
        gang.spawn("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        failed = gang.wait("w1", Failed)
        assert failed.final
        assert "run.keep" in failed.traceback


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count))[:, None])


def prepared(*sizes: int, **how: Any) -> tuple[Run, Callable[[torch.Tensor], None], list[Any]]:
    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loaders = [DataLoader(numbers(40), batch_size=size) for size in sizes]
    _, _, *elastic = run.prepare(model, optimizer, *loaders, **how)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()

    return run, step, elastic


def test_a_step_of_two_loaders_is_one_step() -> None:
    run, step, (a, b) = prepared(8, 4)
    for _ in run.epochs(2):
        for (x,), (y,) in zip(a, b, strict=False):
            assert (len(x), len(y)) == (8, 4)
            step(x)
    assert run.step == run._engine.current.step == 10


def test_a_loop_inside_another_counts_its_own_steps() -> None:
    run, step, (a, b) = prepared(20, 8)
    for _ in run.epochs(2):
        for _ in a:
            for (y,) in b:
                step(y)
    assert run.step == 2 * 2 * 5


def test_what_cycle_keeps_is_refused() -> None:
    run, step, (a, b) = prepared(8, 8)

    def train() -> None:
        for _ in run.epochs(1):
            for (x,), _ in zip(a, itertools.cycle(b), strict=False):
                step(x)

    with pytest.raises(InputError, match=r"itertools\.cycle repeats.*while True: yield from loader"):
        train()
    assert run.step == 0


def test_one_loader_twice_at_once_is_refused() -> None:
    run, step, (a,) = prepared(8)

    def train() -> None:
        for _ in run.epochs(1):
            for (x,), _ in zip(a, a, strict=False):
                step(x)

    with pytest.raises(InputError, match="two loops over the same elastic loader"):
        train()


def test_a_loop_over_several_epochs_is_refused() -> None:
    run, step, (a,) = prepared(8)

    def train() -> None:
        loop = iter(a)
        for _ in run.epochs(2):
            for _ in range(3):
                (x,) = next(loop)
                step(x)

    with pytest.raises(InputError, match="continues from one epoch into the next"):
        train()


def test_a_loop_beside_that_goes_on_into_the_next_epoch_is_refused() -> None:
    run, step, (a, b) = prepared(8, 4)

    def train() -> None:
        loop = iter(b)
        for _ in run.epochs(2):
            for (x,) in a:
                next(loop)
                step(x)

    with pytest.raises(InputError, match="continues from one epoch into the next"):
        train()
    assert run.step == 5


def test_whoever_resumes_between_epochs_is_where_the_others_are_in_a_loop_beside() -> None:
    """The loop beside has batches left when the epoch ends, and stands until it is begun anew."""
    whole, states = epochs_beside(None)
    again, _ = epochs_beside(states[1])
    assert again == whole[1:]


def epochs_beside(state: dict[str, Any] | None) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Both loaders' first examples of every step, by epoch, and the state when each epoch begins."""
    run, step, (a, b) = prepared(8, 4)
    if state is not None:
        run._engine._restore(state)
    epochs: list[list[float]] = []
    states: list[dict[str, Any]] = []
    it: Iterator[Any] = iter(())
    for _ in run.epochs(3):
        states.append(run._engine.state())
        firsts: list[float] = []
        for index, (x,) in enumerate(a):
            if index == 1:  # only now the loop of the last epoch is let go, amid one that leads
                it = iter(b)
            if index >= 1:
                firsts += [float(x[0]), float(next(it)[0][0])]
            step(x)
        epochs.append(firsts)
    return epochs, states


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", [{"adaptive": True}, {"per_worker_batch": (1, 4)}])
def test_two_loaders_with_split_batches_are_refused(how: dict[str, Any], turned: bool) -> None:
    run, step, (a, b) = prepared(8, 8, **how)
    if turned:
        a, b = b, a

    def train() -> None:
        for _ in run.epochs(1):
            for (x,), _ in zip(a, b, strict=False):
                step(x)

    with pytest.raises(InputError, match="two elastic loaders are looped over together"):
        train()


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4), (4, 8)])
def test_two_loaders_that_one_worker_alone_must_split_are_refused_in_a_group_of_any_size(
    sizes: tuple[int, int],
) -> None:
    """Two workers make each batch in one pass; after one has left, the other could not."""
    run, _, (a, b) = prepared(*sizes, per_worker_batch=(1, 4))
    engine = run._engine
    for loader in (a, b):
        engine.expect(loader.source)
    engine.group.world = 2
    engine.progress.begin_epoch()
    loops = zip(a, b, strict=False)
    (x,), _ = next(loops)
    assert (engine.current.layout.passes, len(x)) == (1, sizes[0] // 2)
    with pytest.raises(InputError, match="two elastic loaders are looped over together"):
        next(loops)


def test_two_loaders_whose_batches_one_worker_can_hold_are_looped_over_together() -> None:
    run, step, (a, b) = prepared(8, 4, per_worker_batch=(1, 8))
    for _ in run.epochs(1):
        for (x,), _ in zip(a, b, strict=False):
            step(x)
    assert run.step == 5


def test_a_run_may_be_finished_amid_two_loops() -> None:
    run, step, (a, b) = prepared(8, 8)
    for _ in run.epochs(1):
        for index, ((x,), _) in enumerate(zip(a, b, strict=False)):
            step(x)
            if index == 1:
                run.finish()
    assert index == 4
