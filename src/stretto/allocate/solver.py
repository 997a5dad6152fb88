"""The shared engine: which job gets how many GPUs on which nodes, so that the sum of values is largest.

1. *Walk.* Ignoring where GPUs are, choosing a size for each job is a multiple-choice knapsack, solved up
   to its last item by the hull walk (hull.py). Staying exactly as it is, is a choice too, the only one that
   pays no resize cost.
2. *Pack.* Jobs that stay, stay; the others go, largest first, onto the fewest nodes (board.py). What finds
   no room takes the best smaller size that does.
3. *Polish.* Local search on real placements: a job takes a better size from what is free, or a pair of jobs
   shifts GPUs from one to the other, as long as the sum of values rises. It starts twice, from the packed
   answer and from the present state, and the better end wins: the present state is often nearly optimal
   and always feasible.

Nothing is random; ties go to the earlier job and the earlier node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stretto.allocate.board import EMPTY, Board, Placement
from stretto.allocate.hull import hull_walk
from stretto.models.goodput import Ints
from stretto.models.speed import Floats

FULL_MENU = 2500
"""Up to this many (job, size) pairs menus are complete from the start; beyond, they grow as jobs reach their end."""
DENSE_MENU = 6000
"""Up to this many (job, size) pairs every size is on the menu; beyond, whole nodes after the first."""
SHIFT_TRIES = 12
"""Pairs tried for each number of shifted GPUs in a round of polishing."""
MAX_SHIFT = 16
"""Most GPUs shifted between two jobs at once."""
EFFORT = 50_000
"""Jobs looked at while polishing, over all rounds: what bounds its time on the largest clusters."""
GAP = 1e-4
"""The search ends within this share of the bound (of the value of those jobs that hold something)."""


class Values(Protocol):
    """What each job's outcome is worth. Sums of these are maximised."""

    @property
    def nothing(self) -> Floats:
        """Value of holding nothing, a job each."""

    @property
    def keep(self) -> Floats:
        """Value of staying exactly as it is, for the jobs that hold something."""

    def changed(self, job: Ints, nodes: Ints, gpus: Ints) -> Floats:
        """Value of a new placement of `gpus` GPUs on `nodes` nodes."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One job as the engine sees it."""

    held: Placement
    min_gpus: int
    max_gpus: int
    pinned: bool = False
    """Keeps exactly what it holds."""


@dataclass(frozen=True, slots=True)
class Solution:
    placements: list[Placement]
    value: float
    bound: float
    """No feasible answer over the same menus is worth more."""


def solve(
    node_gpus: Sequence[int],
    contenders: Sequence[Contender],
    values: Values,
    *,
    max_nodes: int = 16,
    avoid_interference: bool = True,
) -> Solution:
    """Place the contenders on nodes with `node_gpus` GPUs each."""
    if not contenders:
        return Solution([], 0.0, 0.0)
    menus = _Menus(node_gpus, contenders, values)
    chosen, bound = _choose(menus, contenders, sum(node_gpus))
    ends = []
    for start in (_packed, _as_it_is):
        board = Board(node_gpus, max_nodes=max_nodes, avoid_interference=avoid_interference)
        state = _State(board, contenders, menus)
        start(state, chosen)
        _polish(state, bound)
        ends.append(Solution(state.placements, sum(state.value), bound))
        if _good_enough(state, bound):
            break
    return max(ends, key=lambda end: end.value)


class _Menus:
    """The value of every size of every job on the fewest nodes, evaluated in batches and extended on demand."""

    def __init__(self, node_gpus: Sequence[int], contenders: Sequence[Contender], values: Values) -> None:
        self._values = values
        self._contenders = contenders
        self.nothing = [float(value) for value in values.nothing]
        self.keep = [float(value) for value in values.keep]
        self._fewest = _fewest_nodes(node_gpus)
        self._node_size = max(node_gpus)
        self.sizes: list[list[int]] = [[] for _ in contenders]
        self.worth: list[dict[int, float]] = [{} for _ in contenders]
        self._odd: dict[tuple[int, int, int], float] = {}
        everything = max(one.max_gpus for one in contenders)
        fair = -(-sum(node_gpus) // len(contenders))
        few = len(contenders) * everything <= FULL_MENU
        self.extend(range(len(contenders)), everything if few else max(2 * fair, self._node_size))

    def extend(self, jobs: Sequence[int], reach: int) -> None:
        """Put the sizes up to `reach` on the menus of `jobs`."""
        dense = len(self._contenders) * reach <= DENSE_MENU
        wanted: list[tuple[int, int]] = []
        for job in jobs:
            one = self._contenders[job]
            top = min(one.max_gpus, reach, len(self._fewest) - 1)
            bottom = max(one.min_gpus, 1, self.sizes[job][-1] + 1 if self.sizes[job] else 1)
            step = 1 if dense else self._node_size
            first = range(bottom, min(top, self._node_size) + 1)
            start = -(-max(bottom, self._node_size + 1) // step) * step
            for size in (*first, *range(start, top + 1, step)):
                wanted.append((job, size))
        if not wanted:
            return
        job_array, size_array = (np.array(column, dtype=np.int64) for column in zip(*wanted, strict=True))
        worth = self._values.changed(job_array, np.array(self._fewest)[size_array], size_array)
        for (job, size), value in zip(wanted, worth.tolist(), strict=True):
            self.sizes[job].append(size)
            self.worth[job][size] = value

    def value(self, job: int, placement: Placement) -> float:
        """What a placement is worth to the job."""
        if not placement:
            return self.nothing[job]
        if placement == self._contenders[job].held:
            return self.keep[job]
        gpus = sum(count for _, count in placement)
        if len(placement) == self._fewest[gpus] and gpus in self.worth[job]:
            return self.worth[job][gpus]
        key = (job, len(placement), gpus)
        if key not in self._odd:
            self._odd[key] = float(self._values.changed(*(np.array([part]) for part in key))[0])
        return self._odd[key]


def _fewest_nodes(node_gpus: Sequence[int]) -> list[int]:
    """Fewest nodes that could hold each number of GPUs, were the cluster empty."""
    fewest = [0]
    for nodes, gpus in enumerate(sorted(node_gpus, reverse=True), start=1):
        fewest.extend([nodes] * gpus)
    return fewest


def _choose(menus: _Menus, contenders: Sequence[Contender], capacity: int) -> tuple[list[int | None], float]:
    """The walk's size for each job (None: as it is); menus grow while a job takes the last entry of its own."""
    while True:
        offers: list[list[tuple[int, float]]] = []
        for job, one in enumerate(contenders):
            held = sum(count for _, count in one.held)
            keep = [(held, menus.keep[job])] if held else []
            if one.pinned and held:
                offers.append(keep)
                continue
            offers.append(
                [
                    (0, menus.nothing[job]),
                    *keep,
                    *((size, menus.worth[job][size]) for size in menus.sizes[job]),
                ]
            )
        walk = hull_walk(offers, capacity)
        chosen: list[int | None] = []
        grow: list[int] = []
        for job, one in enumerate(contenders):
            pick = walk.chosen[job]
            stays = bool(one.held) and (len(offers[job]) == 1 or pick == 1)
            chosen.append(None if stays else offers[job][pick][0])
            sizes = menus.sizes[job]
            if sizes and offers[job][pick][0] == sizes[-1] < one.max_gpus and not stays:
                grow.append(job)
        longest = max((menus.sizes[job][-1] for job in grow), default=0)
        before = [len(menus.sizes[job]) for job in grow]
        if grow:
            menus.extend(grow, 2 * longest)
        if not grow or before == [len(menus.sizes[job]) for job in grow]:
            return chosen, walk.bound


class _State:
    """Placements and their values while the search goes on."""

    def __init__(self, board: Board, contenders: Sequence[Contender], menus: _Menus) -> None:
        self.board = board
        self.contenders = contenders
        self.menus = menus
        self.placements: list[Placement] = [EMPTY] * len(contenders)
        self.value = list(menus.nothing)
        self.size = [0] * len(contenders)
        self._on_node: dict[int, set[int]] = {}

    def blockers(self, job: int, placement: Placement) -> list[int]:
        """Other jobs on the nodes of a placement."""
        others = set().union(*(self._on_node.get(node, set()) for node, _ in placement))
        return sorted(others - {job})

    def set(self, job: int, placement: Placement) -> None:
        if self.placements[job]:
            self.board.lift(self.placements[job])
            for node, _ in self.placements[job]:
                self._on_node[node].discard(job)
        if placement:
            self.board.put(placement)
            for node, _ in placement:
                self._on_node.setdefault(node, set()).add(job)
        self.placements[job] = placement
        self.size[job] = sum(count for _, count in placement)
        self.value[job] = self.menus.value(job, placement)

    def find(self, job: int, gpus: int) -> Placement | None:
        """Room for the job at this size: where it was if that is the size it held, else the fewest nodes."""
        if gpus == 0:
            return EMPTY
        held = self.contenders[job].held
        if held and gpus == sum(count for _, count in held) and self.board.fits(held):
            return held
        return self.board.find(gpus)

    def best(self, job: int) -> Placement:
        """The best placement of a job that holds nothing, in what is free now."""
        menus = self.menus
        best, best_value = EMPTY, menus.nothing[job]
        held = self.contenders[job].held
        if held and menus.keep[job] > best_value and self.board.fits(held):
            best, best_value = held, menus.keep[job]
        free = self.board.free_total
        worth = menus.worth[job]
        offers = sorted(
            ((worth[size], -size) for size in menus.sizes[job] if size <= free and worth[size] > best_value),
            reverse=True,
        )
        for bound, negative_size in offers:
            if bound <= best_value:
                break
            placement = self.board.find(-negative_size)
            if placement is None:
                continue
            value = menus.value(job, placement)
            if value > best_value:
                best, best_value = placement, value
        return best


def _packed(state: _State, chosen: Sequence[int | None]) -> None:
    movers = []
    for job, size in enumerate(chosen):
        held = state.contenders[job].held
        if size is None and state.board.fits(held):
            state.set(job, held)
        else:
            movers.append((sum(count for _, count in held) if size is None else size, job))
    unplaced = []
    for size, job in sorted(movers, key=lambda mover: (-mover[0], mover[1])):
        placement = state.find(job, size)
        if placement is None:
            unplaced.append(job)
        elif placement:
            state.set(job, placement)
    for job in unplaced:
        state.set(job, state.best(job))


def _as_it_is(state: _State, chosen: Sequence[int | None]) -> None:
    del chosen
    for job, one in enumerate(state.contenders):
        if one.held and state.board.fits(one.held):
            state.set(job, one.held)


def _polish(state: _State, bound: float) -> None:
    a_round = len(state.contenders) * (MAX_SHIFT + 2)
    for _ in range(max(1, EFFORT // a_round)):
        if _good_enough(state, bound) or not (_take_free(state) | _reclaim(state) | _shift(state)):
            return


def _good_enough(state: _State, bound: float) -> bool:
    at_stake = sum(abs(value) for value, size in zip(state.value, state.size, strict=True) if size)
    return bound - sum(state.value) <= GAP * at_stake


def _take_free(state: _State) -> bool:
    """Each job in turn takes the best placement within its own and the free GPUs."""
    improved = False
    menus = state.menus
    for job, one in enumerate(state.contenders):
        if one.pinned and one.held:
            continue
        reach = state.size[job] + state.board.free_total
        value = state.value[job]
        worth = menus.worth[job]
        hopeful = (one.held and menus.keep[job] > value) or any(
            worth[size] > value for size in menus.sizes[job] if size <= reach
        )
        if not hopeful:
            continue
        old = state.placements[job]
        state.set(job, EMPTY)
        new = state.best(job)
        if menus.value(job, new) > value:
            state.set(job, new)
            improved = True
        else:
            state.set(job, old)
    return improved


def _reclaim(state: _State) -> bool:
    """A job that was moved away goes back to where it was, and those in its place go elsewhere."""
    improved = False
    for job, one in enumerate(state.contenders):
        if not one.held or state.menus.keep[job] <= state.value[job]:
            continue
        movers = [other for other in state.blockers(job, one.held) if not state.contenders[other].pinned]
        old = [(other, state.placements[other]) for other in (job, *movers)]
        before = sum(state.value[other] for other, _ in old)
        sizes = {other: state.size[other] for other in movers}
        for other, _ in old:
            state.set(other, EMPTY)
        if state.board.fits(one.held):
            state.set(job, one.held)
            for other in sorted(movers, key=lambda other: (-sizes[other], other)):
                state.set(other, state.find(other, sizes[other]) or state.best(other))
        if sum(state.value[other] for other, _ in old) > before + 1e-12:
            improved = True
        else:
            _restore(state, old)
    return improved


def _restore(state: _State, old: Sequence[tuple[int, Placement]]) -> None:
    for job, _ in old:
        state.set(job, EMPTY)
    for job, placement in old:
        state.set(job, placement)


def _shift(state: _State) -> bool:
    """Pairs of jobs shift GPUs: most promising first, judged by value alone, then really placed."""
    improved = False
    free = state.board.free_total
    for count in range(1, MAX_SHIFT + 1):
        losses, gains = _offers(state, count, free)
        for loss, donor in losses[:SHIFT_TRIES]:
            for gain, taker, size in gains[:SHIFT_TRIES]:
                if gain <= loss:
                    break
                if donor != taker and _try_shift(state, donor, state.size[donor] - count, taker, size):
                    improved = True
                    losses, gains = _offers(state, count, state.board.free_total)
                    break
    return improved


def _offers(
    state: _State, count: int, free: int
) -> tuple[list[tuple[float, int]], list[tuple[float, int, int]]]:
    """What each job loses by giving `count` GPUs, and gains by taking up to `count` and the free ones."""
    menus = state.menus
    losses, gains = [], []
    for job, one in enumerate(state.contenders):
        if one.pinned and one.held:
            continue
        gpus, value, worth = state.size[job], state.value[job], menus.worth[job]
        if gpus == count:
            losses.append((value - menus.nothing[job], job))
        elif gpus - count in worth:
            losses.append((value - worth[gpus - count], job))
        better = [
            (worth[size] - value, job, size)
            for size in menus.sizes[job]
            if gpus < size <= gpus + count + free
        ]
        if better:
            gains.append(max(better))
    return sorted(losses), sorted(gains, reverse=True)


def _try_shift(state: _State, donor: int, donor_size: int, taker: int, taker_size: int) -> bool:
    old = [(job, state.placements[job]) for job in (donor, taker)]
    before = state.value[donor] + state.value[taker]
    for order in ((taker, taker_size), (donor, donor_size)), ((donor, donor_size), (taker, taker_size)):
        for job, _ in old:
            state.set(job, EMPTY)
        for job, size in order:
            placement = state.find(job, size)
            if placement is not None:
                state.set(job, placement)
        if state.value[donor] + state.value[taker] > before + 1e-12:
            return True
    _restore(state, old)
    return False
