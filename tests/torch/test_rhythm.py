"""The pattern in which code steps, and where newcomers may join it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from stretto.core.errors import InputError
from stretto.torch import Run
from stretto.torch.group import DivergedError, Group, OrderKind, Rendezvous
from stretto.torch.step_pattern import StepPattern, StepPatterns


def test_steps_with_other_batches_are_told_from_those_of_the_leader() -> None:
    group = Group(Rendezvous())
    note = torch.tensor([OrderKind.NOTHING, 0, 0, 3, 77, 5, 2])
    group._pending = (note, SimpleNamespace(wait=lambda: None), 77)
    assert group._take() is None
    assert group.length_asked_in == (5, 2)
    group._pending = (note, SimpleNamespace(wait=lambda: None), 78)
    with pytest.raises(DivergedError, match=r"in other batches than worker 0.*Step with every batch"):
        group._take()


# The pattern of steps


def beats(pattern: str, times: int) -> list[int]:
    return [int(one) for one in pattern] * times


@given(st.integers(1, 40), st.integers(0, 39))
def test_a_pattern_is_known_once_it_came_twice(length: int, place: int) -> None:
    pattern = [0] * length
    pattern[place % length] = 1
    rhythm, anew = StepPattern(), []
    for count, steps in enumerate(pattern * 4, start=1):
        rhythm.record(steps, needed=1)
        if rhythm.begins_anew:
            anew.append(count)
    assert anew == [2 * length, 3 * length, 4 * length]
    assert rhythm.is_plain is (length == 1)


def test_a_pattern_has_every_optimizer_in_it() -> None:
    """The second one steps with every third batch."""
    rhythm, anew = StepPattern(), []
    for count, steps in enumerate([1, 1, 3] * 3, start=1):
        rhythm.record(steps, needed=3)
        if rhythm.begins_anew:
            anew.append(count)
    assert anew == [6, 9]


def test_a_step_that_was_skipped_is_an_exception() -> None:
    rhythm = StepPattern()
    for steps in beats("1111011", 1):
        rhythm.record(steps, needed=1)
    assert rhythm.is_broken
    assert not rhythm.begins_anew
    for steps in beats("1", 20):
        rhythm.record(steps, needed=1)
    assert rhythm.is_plain


def joins(epochs: list[str], *, length: int, asks: bool = False) -> list[tuple[int, int]]:
    """Epochs and batches after which a newcomer may join; batch 0 is the end of an epoch."""
    cadence, found = StepPatterns(), []
    for epoch, pattern in enumerate(epochs):
        cadence.begin(epoch, 0)
        for count, steps in enumerate(beats(pattern, 1), start=1):
            cadence.record(steps, 1, waits=not steps, asked_length=asks)
            cadence.agree(cadence.length_asked_in)
            again = StepPatterns()
            again.restore(json.loads(json.dumps(cadence.state()), object_hook=_int_keys))
            again.begin(epoch, 0)
            assert again.state() == cadence.state()
            if count < length and cadence.may_join(lambda: length):
                found.append((epoch, count))
        cadence.end()
        if cadence.may_join_between_epochs:
            found.append((epoch, 0))
    return found


def _int_keys(mapping: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: one for key, one in mapping.items()}


def test_plain_code_is_joined_anywhere() -> None:
    assert joins(["1111", "1111"], length=4) == [(0, 2), (0, 3), (0, 0), (1, 1), (1, 2), (1, 3), (1, 0)]


def test_an_index_that_divides_the_epoch_is_joined_at_its_multiples() -> None:
    assert joins(["01010101"], length=8) == [(0, 4), (0, 6), (0, 0)]


def test_what_is_left_over_is_waited_for_once() -> None:
    """Whether the last batch steps, too, is not known at first, unless the code asks for the length."""
    assert joins(["0101010", "0101010"], length=7) == [(1, 4), (1, 6), (1, 0)]
    assert joins(["0101011", "0101011"], length=7) == [(0, 0), (1, 0)]
    assert joins(["0101011", "0101011"], length=7, asks=True) == [
        (0, 4),
        (0, 6),
        (0, 0),
        (1, 4),
        (1, 6),
        (1, 0),
    ]


@pytest.mark.parametrize("asker", [0, 1])
def test_workers_agree_on_where_to_join_if_only_one_asks_for_the_length(asker: int) -> None:
    """What rank 0 has said a look before holds for all; here it is said with every batch."""
    cadences, said, found = [StepPatterns(), StepPatterns()], (-1, -1), []
    for epoch in range(2):
        for cadence in cadences:
            cadence.begin(epoch, 0)
        for count, steps in enumerate(beats("0101011", 1), start=1):
            for rank, cadence in enumerate(cadences):
                cadence.record(steps, 1, waits=not steps, asked_length=rank == asker and epoch == 0)
                cadence.agree(said)
            said = cadences[0].length_asked_in
            first, second = (cadence.may_join(lambda: 7) for cadence in cadences)
            assert first is second
            if first and count < 7:
                found.append((epoch, count))
        for cadence in cadences:
            cadence.end()
    assert found == ([(0, 4), (0, 6)] if asker == 0 else [])


def test_a_counter_of_the_codes_own_is_joined_at_its_multiples() -> None:
    assert joins(["01010", "10101", "01010"], length=5) == [(1, 1), (1, 3), (1, 0), (2, 2), (2, 4)]


# Together with batches that are split


@pytest.mark.parametrize("how", [{"adaptive": True}, {"per_worker_batch": (1, 4)}])
def test_accumulating_by_hand_is_refused_where_batches_are_split(how: dict[str, Any]) -> None:
    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader, **how)

    def train() -> None:
        for _ in run.epochs(1):
            for (x,) in loader:
                model(x).mean().backward()

    with pytest.raises(InputError, match="accumulated by hand"):
        train()
    assert run.step == 0


@pytest.mark.parametrize("how", [{"adaptive": True}, {"per_worker_batch": (1, 4)}])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("before_backward", [True, False])
def test_a_batch_may_be_skipped_where_batches_are_split(
    how: dict[str, Any], to_none: bool, before_backward: bool
) -> None:
    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = torch.ones(64, 1)
    numbers[[8, 16, 40]] = math.inf
    loader = DataLoader(TensorDataset(numbers), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader, **how)
    for _ in run.epochs(2):
        bad = False
        for (x,) in loader:
            bad |= not bool(x.isfinite().all())
            optimizer.zero_grad(set_to_none=to_none)
            if not (bad and before_backward):
                model(x).mean().backward()
            if bad:
                bad = not run._engine.current.share.last
                continue
            optimizer.step()
    assert run.step == 2 * (8 - 3)
    assert bool(model.weight.isfinite().all())


def test_a_worker_that_joined_late_has_its_own_length() -> None:
    run = Run()
    loader = run.prepare(DataLoader(TensorDataset(torch.zeros(50, 1)), batch_size=8))
    lengths = []
    for epoch in run.epochs(2):
        for _ in loader:
            if epoch == 0 and loader.position.examples == 16:
                state = run._engine.state()
            lengths.append(len(loader))
    assert set(lengths) == {7}
    late = Run()
    loader = late.prepare(DataLoader(TensorDataset(torch.zeros(50, 1)), batch_size=8))
    late._engine._restore(state)
    assert len(loader) == 7
    seen = [[(i, len(loader)) for i, _ in enumerate(loader)] for _ in late.epochs(2)]
    assert seen == [[(i, 5) for i in range(5)], [(i, 7) for i in range(7)]]
