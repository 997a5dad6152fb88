"""Loops over elastic loaders: which of them count, how they end, the order and size of what they give."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler, TensorDataset

import loops_train
from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.torch import Run
from stretto.torch.adaptive import BatchTuner, GpuMemory
from stretto.torch.batching import Batching
from stretto.torch.data import DataSource
from stretto.torch.step_layout import StepLayout
from stretto.wire.messages import Finished, Report
from torch_gang import Cradle, Gang


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count))[:, None])


def adaptive_run(
    *loaders: DataLoader[Any], **options: Any
) -> tuple[Run, Callable[[torch.Tensor], None], Any]:
    """A run, how it takes a step, and its loaders."""
    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, _, *elastic = run.prepare(model, optimizer, *loaders, adaptive=True, **options)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()

    return run, step, elastic


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# How loops end


def test_a_pass_without_a_whole_batch_ends_the_loop() -> None:
    loaders = DataLoader(numbers(10), batch_size=16, drop_last=True), DataLoader(numbers(10), batch_size=5)
    run, _, (loader, _) = adaptive_run(*loaders)
    with at_most(10.0):
        assert [len(x) for _ in run.epochs(2) for (x,) in loader] == []


def test_no_batch_is_larger_than_half_the_data() -> None:
    loader = DataLoader(numbers(40), batch_size=16, drop_last=True)
    run, _, _ = adaptive_run(loader, max_batch_size=4096)
    assert run._engine.batching.limits(run._engine.batching.counted).max == 20  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["ab", "ba", "aa", "aba"])
def test_every_loop_of_an_adaptive_epoch_gets_its_data(order: str) -> None:
    """The first over `a` counts work; the others are a pass."""
    run, step, (a, b) = adaptive_run(
        DataLoader(numbers(64), batch_size=16), DataLoader(numbers(30), batch_size=10)
    )
    for _ in run.epochs(2):
        for name in order:
            loader, size = (a, 64) if name == "a" else (b, 30)
            seen: list[float] = []
            for (x,) in loader:
                seen += x.flatten().tolist()
                if loader is a:
                    step(x)
            assert sorted(seen) == list(range(size))


def test_other_loops_keep_their_own_batch() -> None:
    loaders = DataLoader(numbers(64), batch_size=8), DataLoader(numbers(64), batch_size=32)
    run, step, (a, b) = adaptive_run(*loaders, max_batch_size=16, per_worker_batch=(8, 32))
    run._engine.batching.order = BatchChoice(16)
    for _ in run.epochs(1):
        step(torch.zeros(1, 1))
        assert [len(x) for (x,) in b] == [32, 32]
        assert max(len(x) for (x,) in a) == 16
        assert [len(x) for (x,) in a] == [8] * 8


def test_an_adaptive_epoch_that_was_broken_off_is_not_made_up_for() -> None:
    run, step, (loader,) = adaptive_run(DataLoader(numbers(64), batch_size=16))
    lengths = []
    for epoch in run.epochs(2):
        lengths.append(0)
        for (x,) in loader:
            step(x)
            lengths[epoch] += len(x)
            if epoch == 0 and lengths[0] >= 32:
                break
    assert lengths == [32, 64]


@pytest.mark.parametrize("stop", [1, 3, 5, 7, 9, 11])
def test_a_run_goes_on_in_the_loop_where_it_was(stop: int) -> None:
    """Each epoch evaluates first (2 steps) and then trains (4); the work is cut in two after `stop` steps."""
    seen: list[tuple[int, str, list[float]]] = []

    def go(state: dict[str, Any] | None) -> dict[str, Any] | None:
        loaders = DataLoader(numbers(64), batch_size=16, shuffle=True), DataLoader(numbers(32), batch_size=16)
        run, step, (train, check) = adaptive_run(*loaders)
        engine = run._engine
        if state is not None:
            engine._restore(state)
        for epoch in run.epochs(2):
            for name, loader in (("check", check), ("train", train)):
                for (x,) in loader:
                    if state is None and engine.current.step == stop:
                        return engine.state()
                    seen.append((epoch, name, x.flatten().tolist()))
                    if name == "train":
                        step(x)
        return None

    go(go(None))
    for epoch in range(2):
        for name, size in (("check", 32), ("train", 64)):
            got = [one for at, loop, some in seen for one in some if (at, loop) == (epoch, name)]
            assert sorted(got) == list(range(size)), (epoch, name)


def test_newcomers_find_the_loop_that_goes_on(tmp_path: Path) -> None:
    """Whichever of an epoch's two it is, no example is lost or doubled."""
    seen = tmp_path / "seen"
    entry = f"{Path(loops_train.__file__)}:train"
    with Cradle(entry, tmp_path) as cradle, Gang(cradle, tmp_path / "a", config={"seen": str(seen)}) as gang:
        gang.spawn("w0")
        gang.form("w0")
        for epoch, name in enumerate(("w1", "w2", "w3")):
            gang.spawn(name)
            gang.form("w0", name)
            gang.wait("w0", Report, lambda report, epoch=epoch: report.epoch > epoch)  # type: ignore[misc]
        gang.wait("w0", Finished)
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert {workers for _, _, workers, _ in lines} == {1, 2}
    for epoch in range(loops_train.EPOCHS):
        for name, count in (("train", loops_train.TRAINED), ("check", loops_train.CHECKED)):
            got = [one for at, loop, _, some in lines for one in some if (at, loop) == (epoch, name)]
            assert sorted(got) == list(range(count)), (epoch, name)


# How large steps are


@pytest.mark.parametrize(
    ("chosen", "chosen_for", "workers", "layout"),
    [
        (BatchChoice(128), 1, 2, StepLayout(128, 2)),
        (BatchChoice(128), 1, 4, StepLayout(128, 4)),
        (BatchChoice(32), 4, 4, StepLayout(128, 4)),
        (BatchChoice(32), 4, 1, StepLayout(128, 1, passes=2)),
        (BatchChoice(32, 1), 2, 2, StepLayout(128, 2, passes=2)),
        (BatchChoice(200), 1, 2, StepLayout(128, 2)),
        (BatchChoice(16), 1, 2, StepLayout(64, 2)),
    ],
)
def test_a_batch_of_the_runs_own_stays_when_workers_come_and_go(
    chosen: BatchChoice, chosen_for: int, workers: int, layout: StepLayout
) -> None:
    """And no worker takes more at once than it did, or than the initial batch makes it."""
    source = DataSource(dataset=numbers(10_000), batch_size=64, shuffle=False)

    def of_the_user() -> Batching:
        batching = Batching()
        batching.bound(adaptive=True, most=128, per_worker=None, accumulates=True)
        batching.expect(source)
        batching.use(source, adapts=True)
        return batching

    first, resumed = of_the_user(), of_the_user()
    first.choose(chosen, chosen_for)
    resumed.load_state_dict(first.state_dict())
    group: Any = SimpleNamespace(world=workers, rank=0)
    assert first.layout(group) == resumed.layout(group) == layout


def test_what_is_prepared_later_leaves_earlier_bounds() -> None:
    run, _, _ = adaptive_run(DataLoader(numbers(640), batch_size=16), max_batch_size=64)
    run.prepare(DataLoader(numbers(40), batch_size=8), per_worker_batch=(1, 32))
    batching = run._engine.batching
    assert batching.counted is not None
    limits = batching.limits(batching.counted)
    assert batching.adaptive
    assert (limits.max, limits.per_gpu_max) == (64, 32)


def test_a_short_step_is_not_split_to_measure_noise() -> None:
    """The ninth step is one to split, and has three examples, too few for two means over several."""
    run, step, (loader,) = adaptive_run(DataLoader(numbers(131), batch_size=16))
    sizes = []
    for _ in run.epochs(1):
        for (x,) in loader:
            sizes.append(len(x))
            step(x)
    assert sizes == [8, 8, 16, 16, 16, 8, 8, 16, 16, 16, 3]


@pytest.mark.parametrize(("examples", "iterations", "steps"), [(64, 16, 4), (67, 17, 5), (69, 18, 5)])
def test_a_step_may_take_several_iterations(examples: int, iterations: int, steps: int) -> None:
    run = Run()
    loader = run.prepare(DataLoader(numbers(examples), batch_size=16), per_worker_batch=(1, 4))
    complete = [run.step_is_complete for _ in run.epochs(1) for _ in loader]
    assert (len(loader), loader.steps) == (iterations, steps) == (len(complete), sum(complete))


def test_each_loader_has_a_length_of_its_own() -> None:
    run = Run()
    first, second = run.prepare(*(DataLoader(numbers(40), batch_size=size) for size in (4, 20)))
    assert (first.batch_size, second.batch_size) == (4, 20)
    for _ in run.epochs(1):
        assert [len(second) for _ in first] == [2] * len(first)


# The order of the data


class Shuffled(Sampler[int]):
    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self._shuffle = shuffle

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        order = list(range(40))
        self._shuffle(order)
        return iter(order)


def own_generator() -> SubsetRandomSampler:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return SubsetRandomSampler(range(40), generator=generator)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: Shuffled(random.shuffle),
        lambda: Shuffled(np.random.shuffle),
        lambda: SubsetRandomSampler(range(40)),
        own_generator,
    ],
)
def test_all_workers_draw_the_same_order_whatever_a_sampler_draws_from(sampler: Any) -> None:
    def order(ambient: int, number: int) -> Sequence[int]:
        random.seed(ambient)
        np.random.seed(ambient)  # noqa: NPY002
        torch.manual_seed(ambient)
        source = DataSource(dataset=numbers(40), batch_size=8, shuffle=False, sampler=sampler())
        list(source.sampler or ())
        before = chance(source)
        drawn = source.order(3, number)
        assert chance(source) == before, "the user's own draws were disturbed"
        return drawn

    assert order(1, 0) == order(2, 0) != order(1, 1)
    assert sorted(order(1, 0)) == list(range(40))


def chance(source: DataSource) -> tuple[Any, ...]:
    own = getattr(source.sampler, "generator", None)
    states = [torch.get_rng_state(), *([] if own is None else [own.get_state()])]
    return (random.getstate(), str(np.random.get_state()), *(state.tolist() for state in states))  # noqa: NPY002


def test_a_sampler_may_be_a_list_but_not_shorter_than_it_says() -> None:
    class Short(list[int]):
        def __len__(self) -> int:
            return 5

    assert DataSource(dataset=numbers(4), batch_size=2, shuffle=False, sampler=[2, 0]).order(0, 0) == [2, 0]  # type: ignore[arg-type]
    with pytest.raises(InputError, match="length is 5, and it gave 2"):
        DataSource(dataset=numbers(4), batch_size=2, shuffle=False, sampler=Short([2, 0])).order(0, 0)  # type: ignore[arg-type]


def test_a_generator_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="is given generator, and it"):
        Run().loader(numbers(4), batch_size=2, generator=torch.Generator())


# Loading it


def test_a_pass_is_cut_as_it_goes() -> None:
    run = Run()
    asked: list[int] = []
    layout_at = run._engine.layout_at

    def layout_of(step: int) -> StepLayout:
        asked.append(step)
        return layout_at(step)

    run._engine.layout_at = layout_of  # type: ignore[method-assign]
    loader = run.loader(numbers(1000), batch_size=1)
    for _ in run.epochs(1):
        next(iter(loader))
    assert len(asked) == 1


def test_a_loop_inside_another_leaves_its_batches_as_they_are() -> None:
    run = Run()
    outer = run.prepare(DataLoader(numbers(20), batch_size=5))
    inner = run.prepare(DataLoader(numbers(20), batch_size=2))
    sizes = [(len(x), {len(y) for (y,) in inner}) for _ in run.epochs(1) for (x,) in outer]
    assert sizes == [(5, {2})] * 4


class WhoLoads(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_processes_that_load_stay_if_they_should() -> None:
    run = Run()
    loader = run.prepare(DataLoader(WhoLoads(), batch_size=4, num_workers=1, persistent_workers=True))
    assert len({pid for _ in run.epochs(3) for pids in loader for pid in pids.tolist()}) == 1


# Memory


@pytest.mark.parametrize("card_bytes", [8e9, 16e9, 40e9])
def test_the_batch_grows_as_far_as_the_card_holds_it(
    monkeypatch: pytest.MonkeyPatch, card_bytes: float
) -> None:
    """1 GB and 50 MB for each example."""
    batch = BatchChoice(64)

    def needed() -> int:
        return int(1e9 + batch.atomic * 0.05e9)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", needed)
    monkeypatch.setattr(torch.cuda, "memory_reserved", needed)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (card_bytes - needed(), card_bytes))
    limits = BatchLimits(initial=64, requested=64, max=4096, per_gpu_min=1, per_gpu_max=4096)
    tuner = BatchTuner(limits, GpuMemory())
    for step in range(32, 400):
        if step % 20 == 0:
            tuner.observe([SpeedSample(1, 1, 0, batch.atomic, 0.01 + batch.atomic * 1e-6, 0.0)])
        noise = NoiseSample(sqr=1.0, var=100.0 + step)
        change = tuner.propose(noise, nodes=1, workers=1, current=batch, step=step)
        batch = batch if change is None else change.batch
        assert needed() <= card_bytes, "out of memory"
    assert needed() >= 0.5 * card_bytes
