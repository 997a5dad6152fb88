"""Local search on real placements: every move keeps all constraints and raises the sum of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.allocate.menus import Contender, Menus
from stretto.allocate.placements import EMPTY, FreeGpus, Placement

SHIFT_TRIES = 12
"""Donors tried per round for each number of shifted GPUs, and takers tried for each donor."""
MAX_SHIFT = 8
"""Most GPUs shifted between two jobs at once."""
EFFORT = 50_000
"""Jobs visited over all rounds; limits the time on the largest clusters."""
GAP = 1e-4
"""The search ends this close to the bound, as a share of the value of the jobs that hold GPUs."""
GAIN = 1e-12
"""Smaller improvements are float noise."""


class State:
    """Placements and their values during the search."""

    def __init__(self, free: FreeGpus, contenders: Sequence[Contender], menus: Menus) -> None:
        self.free = free
        self.contenders = contenders
        self.menus = menus
        self.placements: list[Placement] = [EMPTY] * len(contenders)
        self.value = list(menus.nothing)
        self.size = [0] * len(contenders)
        self._on_node: dict[int, set[int]] = {}

    def set(self, job: int, placement: Placement) -> None:
        """Replace the job's placement by one that must fit."""
        if self.placements[job]:
            self.free.give_back(self.placements[job])
            for node, _ in self.placements[job]:
                self._on_node[node].discard(job)
        if placement:
            self.free.take(placement)
            for node, _ in placement:
                self._on_node.setdefault(node, set()).add(job)
        self.placements[job] = placement
        self.size[job] = sum(count for _, count in placement)
        self.value[job] = self.menus.value(job, placement)

    def blockers(self, job: int, placement: Placement) -> list[int]:
        """Other jobs on the nodes of a placement."""
        others: set[int] = set().union(*(self._on_node.get(node, set()) for node, _ in placement))
        return sorted(others - {job})

    def find(self, job: int, gpus: int) -> Placement | None:
        """A placement of this size: where the job was if it held this size, else on the fewest nodes.

        None if there is no room, or if the job can neither take this size nor stay as it is.
        """
        if gpus == 0:
            return EMPTY
        one = self.contenders[job]
        if one.held and gpus == sum(count for _, count in one.held) and self.free.fits(one.held):
            return one.held
        return self.free.find(gpus) if one.takes(gpus) else None

    def best(self, job: int) -> Placement:
        """The best placement for a job that holds nothing, on free GPUs."""
        menus = self.menus
        best, best_value = EMPTY, menus.nothing[job]
        held = self.contenders[job].held
        if held and menus.keep[job] > best_value and self.free.fits(held):
            best, best_value = held, menus.keep[job]
        free = self.free.total
        offers = [
            (worth, -size) for size, worth in menus.worth[job].items() if size <= free and worth > best_value
        ]
        for bound, negative_size in sorted(offers, reverse=True):
            if bound <= best_value:
                break
            placement = self.free.find(-negative_size)
            if placement is not None and menus.value(job, placement) > best_value:
                best, best_value = placement, menus.value(job, placement)
        return best


def polish(state: State, bound: float) -> None:
    """Improve until nothing helps, the bound is reached, or the effort limit is reached."""
    a_round = len(state.contenders) * (MAX_SHIFT + 2)
    for _ in range(max(1, EFFORT // a_round)):
        if good_enough(state, bound) or not (_take_free(state) | _reclaim(state) | _shift(state)):
            return


def good_enough(state: State, bound: float) -> bool:
    at_stake = sum(abs(value) for value, size in zip(state.value, state.size, strict=True) if size)
    return bound - sum(state.value) <= GAP * at_stake


def _take_free(state: State) -> bool:
    """Each job in turn takes the best placement on its own and the free GPUs."""
    improved = False
    for job, one in enumerate(state.contenders):
        if one.stays or not _could_gain(state, job, one):
            continue
        old, value = state.placements[job], state.value[job]
        state.set(job, EMPTY)
        state.set(job, state.best(job))
        if state.value[job] > value + GAIN:
            improved = True
        else:
            _restore(state, [(job, old)])
    return improved


def _could_gain(state: State, job: int, one: Contender) -> bool:
    value = state.value[job]
    if one.held and state.menus.keep[job] > value:
        return True
    reach = state.size[job] + state.free.total
    return any(worth > value for size, worth in state.menus.worth[job].items() if size <= reach)


def _reclaim(state: State) -> bool:
    """Jobs that were moved go back to where they were, and the jobs in their place go elsewhere."""
    improved = False
    for job, one in enumerate(state.contenders):
        if not one.held or state.menus.keep[job] <= state.value[job]:
            continue
        movers = [other for other in state.blockers(job, one.held) if not state.contenders[other].stays]
        old = [(other, state.placements[other]) for other in (job, *movers)]
        before = _value(state, (job, *movers))
        sizes = {other: state.size[other] for other in movers}
        for other, _ in old:
            state.set(other, EMPTY)
        if state.free.fits(one.held):
            state.set(job, one.held)
            for other in sorted(movers, key=lambda other: (-sizes[other], other)):
                state.set(other, state.find(other, sizes[other]) or state.best(other))
        if _value(state, (job, *movers)) > before + GAIN:
            improved = True
        else:
            _restore(state, old)
    return improved


def _shift(state: State) -> bool:
    """Move GPUs from one job to another: the most promising pairs are tried on real nodes."""
    improved = False
    for count in range(1, MAX_SHIFT + 1):
        takers = _takers(state, count)
        for donor in _donors(state, count)[:SHIFT_TRIES]:
            loss = _loss(state, donor, count)  # an earlier shift may have changed what it has to give
            if loss is None:
                continue
            for gain, taker, size in takers[:SHIFT_TRIES]:
                if gain <= loss:
                    break
                if donor != taker and _try_shift(state, (donor, state.size[donor] - count), (taker, size)):
                    improved = True
                    takers = _takers(state, count)
                    break
    return improved


def _donors(state: State, count: int) -> list[int]:
    """Jobs that can give `count` GPUs, the one that loses least first."""
    losses = ((_loss(state, job, count), job) for job in range(len(state.contenders)))
    return [job for _, job in sorted((loss, job) for loss, job in losses if loss is not None)]


def _loss(state: State, job: int, count: int) -> float | None:
    """What a job loses by giving up `count` of its GPUs; None if it cannot."""
    if state.contenders[job].stays:
        return None
    left = state.size[job] - count
    rest = state.menus.nothing[job] if left == 0 else state.menus.worth[job].get(left)
    return None if rest is None else state.value[job] - rest


def _takers(state: State, count: int) -> list[tuple[float, int, int]]:
    """(gain, job, size): the best size of each job with `count` more GPUs and the free ones; most first."""
    reach = count + state.free.total
    takers = []
    for job, (one, old) in enumerate(zip(state.contenders, state.size, strict=True)):
        if one.stays:
            continue
        worth = state.menus.worth[job]
        larger = range(old + 1, min(old + reach, one.max_gpus) + 1)
        best = max((size for size in larger if size in worth), key=worth.__getitem__, default=None)
        if best is not None and worth[best] > state.value[job]:
            takers.append((worth[best] - state.value[job], job, best))
    return sorted(takers, key=lambda taker: (-taker[0], taker[1]))


def _try_shift(state: State, donor: tuple[int, int], taker: tuple[int, int]) -> bool:
    """Give both jobs their new sizes, in whichever order works."""
    jobs = (donor[0], taker[0])
    old = [(job, state.placements[job]) for job in jobs]
    before = _value(state, jobs)
    for order in ((taker, donor), (donor, taker)):
        for job in jobs:
            state.set(job, EMPTY)
        for job, size in order:
            placement = state.find(job, size)
            if placement is not None:
                state.set(job, placement)
        if _value(state, jobs) > before + GAIN:
            return True
    _restore(state, old)
    return False


def _value(state: State, jobs: Iterable[int]) -> float:
    return sum(state.value[job] for job in jobs)


def _restore(state: State, old: Sequence[tuple[int, Placement]]) -> None:
    for job, _ in old:
        state.set(job, EMPTY)
    for job, placement in old:
        state.set(job, placement)
