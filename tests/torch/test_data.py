"""Sharing out data: every example once, weights that add up, ordinary DataLoader options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from stretto.core.errors import InputError
from stretto.torch.data import DataPosition, DataSource, ElasticLoader, LoopRole, source_of
from stretto.torch.step_layout import UNSHARED, CurrentStep, StepLayout


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class StubEngine:
    """Splits all steps alike, and ends after so many steps."""

    seed = 3

    def __init__(
        self, layout: StepLayout, role: LoopRole = LoopRole.LEADS, stop_after: int | None = None
    ) -> None:
        self.current = CurrentStep(layout, layout)
        self.steps = 0
        self._role = role
        self._stop_after = stop_after

    @property
    def _is_stopped(self) -> bool:
        return self._stop_after is not None and self.steps >= self._stop_after

    def usual_layout(self, source: DataSource) -> StepLayout:
        base = self.current.base
        return base if self._role is LoopRole.LEADS else replace(base, total=source.batch_size, passes=1)

    def begin(self, _: ElasticLoader) -> LoopRole:
        return self._role

    def after_step(self, _: ElasticLoader) -> bool:
        self.steps += 1
        return self._is_stopped

    def after_beside(self, _: ElasticLoader, inside: bool) -> None: ...

    def is_over(self, loader: ElasticLoader) -> bool:
        return loader.left == 0 or self._is_stopped

    def layout_at(self, _: int) -> StepLayout:
        return self.current.base

    def lay_out(self, layout: StepLayout) -> None: ...

    def end(self, _: ElasticLoader, ran_out: bool) -> None: ...


def loader_at(
    source: DataSource, layout: StepLayout, position: DataPosition, stop_after: int | None = None
) -> ElasticLoader:
    """A loader that goes on from a position, for so many steps."""
    loader = ElasticLoader(source, StubEngine(layout, stop_after=stop_after))
    loader.position = position
    return loader


@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_shares_cover_a_step_once_and_their_weights_add_up(
    examples: int, total: int, workers: int, passes: int
) -> None:
    shares = [
        share
        for rank in range(workers)
        for share in StepLayout(total, workers, passes, rank).shares(examples)
    ]
    covered = sorted(place for share in shares for place in range(share.start, share.stop))
    assert covered == list(range(examples))
    assert sum(share.weight for share in shares) == pytest.approx(len(shares))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 120),
    st.integers(1, 30),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5),
)
def test_every_example_of_a_pass_is_seen_once_across_any_resizes(
    size: int, batch: int, shuffle: bool, stretches: list[tuple[int, int, int]]
) -> None:
    source = DataSource(dataset=Numbers(size), batch_size=batch, shuffle=shuffle)
    position = DataPosition(pass_number=2)
    seen: list[float] = []
    for number, (workers, passes, steps) in enumerate(stretches):
        last = number == len(stretches) - 1
        reached = []
        for rank in range(workers):
            layout = StepLayout(batch, workers, passes, rank)
            loader = loader_at(
                source, layout, DataPosition(position.pass_number, position.examples), None if last else steps
            )
            for values in loader:
                if loader._current.share.weight > 0:
                    seen.extend(values.tolist())
            reached.append(loader.position.examples)
        assert len(set(reached)) == 1, "workers disagree on how far they are"
        position.examples = reached[0]
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize(
    ("examples", "batch", "sizes"),
    [
        (25, 10, [10, 10, 5]),
        (24, 10, [10, 7, 7]),
        (20, 10, [10, 10]),
        (11, 10, [6, 5]),
        (9, 10, [9]),
        (25, 4, [4, 4, 4, 4, 4, 4, 1]),  # the user's own
        (25, 3, [3, 3, 3, 3, 3, 3, 3, 3, 1]),
    ],
)
def test_at_a_larger_batch_than_the_users_no_step_has_few_examples(
    examples: int, batch: int, sizes: list[int]
) -> None:
    source = DataSource(dataset=Numbers(examples), batch_size=4, shuffle=False)
    loader = loader_at(source, StepLayout(batch), DataPosition())
    assert [len(values) for values in loader] == sizes
    assert len(loader) == loader.steps == len(sizes)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_a_pass_has_the_length_it_says(
    examples: int, own: int, batch: int, passes: int, drop_last: bool
) -> None:
    source = DataSource(dataset=Numbers(examples), batch_size=own, shuffle=False, drop_last=drop_last)
    loader = loader_at(source, StepLayout(batch, passes=passes), DataPosition())
    iterations, steps = 0, []
    for _ in loader:
        iterations += 1
        if loader._current.share.last:
            steps.append(loader._current.share.step_examples)
    assert (len(loader), loader.steps) == (iterations, len(steps))
    assert sum(steps) == (examples // batch * batch if drop_last else examples)
    if batch > own:
        assert min(steps, default=batch) >= min(batch // 2, examples)


def test_a_pass_is_shuffled_and_each_pass_otherwise() -> None:
    source = DataSource(dataset=Numbers(50), batch_size=10, shuffle=True)
    first, again, second = source.order(1, 0), source.order(1, 0), source.order(1, 1)
    assert list(first) == list(again)
    assert list(first) != list(second)
    assert list(first) != list(source.order(2, 0))
    assert list(first) != list(range(50))


def test_drop_last_leaves_the_rest_out_at_any_size() -> None:
    source = DataSource(dataset=Numbers(25), batch_size=10, shuffle=False, drop_last=True)
    loader = loader_at(source, StepLayout(10), DataPosition())
    assert [batch.tolist() for batch in loader] == [list(range(10)), list(range(10, 20))]
    assert len(loader) == 2


def test_an_ordinary_loader_keeps_its_options() -> None:
    def collate(items: list[Any]) -> list[Any]:
        return items

    loader = DataLoader(
        Numbers(10), batch_size=4, shuffle=True, num_workers=1, collate_fn=collate, persistent_workers=True
    )
    source = source_of(loader, print)
    assert (source.batch_size, source.shuffle, source.sampler) == (4, True, None)
    assert source.options["num_workers"] == 1
    assert source.options["persistent_workers"] is True
    seen = [one for batch in loader_at(source, StepLayout(4), DataPosition()) for one in batch]
    assert sorted(seen) == list(range(10))


def test_a_sampler_of_the_users_draws_the_same_on_every_worker() -> None:
    sampler = WeightedRandomSampler([1.0, 5.0, 1.0, 1.0], num_samples=8)
    source = source_of(DataLoader(Numbers(4), batch_size=4, sampler=sampler), print)
    before = torch.get_rng_state()
    assert list(source.order(1, 5)) == list(source.order(1, 5))
    assert torch.equal(torch.get_rng_state(), before), "the user's own draws were disturbed"
    assert source.examples == 8


def test_data_without_numbers_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(InputError, match="iterable dataset"):
        source_of(DataLoader(Stream(), batch_size=2), print)
    with pytest.raises(InputError, match="batch sampler"):
        source_of(DataLoader(TensorDataset(torch.zeros(4)), batch_sampler=[[0, 1], [2, 3]]), print)


# Two loaders together


def beside_at(source: DataSource, lead: StepLayout, examples: int | None) -> tuple[list[int], float]:
    """What a worker gets of the first batch beside such a step, and the weight that its gradient has."""
    engine = StubEngine(lead, LoopRole.BESIDE)
    engine.current.share = UNSHARED if examples is None else lead.shares(examples)[0]
    loader = ElasticLoader(source, engine)
    return next(iter(loader)).tolist(), engine.current.share.weight


BATCHES = [(64, 32), (128, 64), (100, 50), (24, 10), (24, 24), (7, 7), (6, 12), (3, 64), (64, 2), (None, 7)]


@pytest.mark.parametrize(("first", "second"), BATCHES)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 6, 8])
def test_all_workers_cut_a_batch_beside_alike(first: int | None, second: int, workers: int) -> None:
    """Every example counts once, be it in one worker's share or in the whole batch on every worker."""
    source = DataSource(dataset=Numbers(second), batch_size=second, shuffle=False)
    given = [
        beside_at(source, StepLayout(first or 1, workers=workers, rank=rank), first)
        for rank in range(workers)
    ]
    assert len({len(batch) == second for batch, _ in given}) == 1
    counted = [0.0] * second
    for batch, weight in given:
        for number in batch:
            counted[number] += weight / workers / len(batch)
    assert counted == pytest.approx([1 / second] * second)
