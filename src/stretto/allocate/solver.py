"""The shared engine: which job gets how many GPUs on which nodes, so that the sum of values is largest.

1. *Walk.* Ignoring where GPUs are, choosing a size for each job is a multiple-choice knapsack, solved up
   to its last item by the hull walk (hull.py). Staying exactly as it is, is a choice too, the only one that
   pays no resize cost. The walk also gives a bound that no placement can exceed.
2. *Pack.* Jobs that stay, stay; the others go, largest first, onto the fewest nodes (board.py). What finds
   no room takes the best smaller size that does.
3. *Polish.* Local search on real placements (polish.py), as long as the sum of values rises and the
   bound is not reached. It starts from the packed answer and, if that ends short of the bound, once more
   from the present state, which is always feasible and often nearly optimal; the better end wins.

Nothing is random; ties go to the earlier job and the earlier node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.allocate.hull import Choice, hull_walk, upper_hull
from stretto.allocate.menus import Contender, Menus, Values
from stretto.allocate.placements import FreeGpus, Placement
from stretto.allocate.polish import State, good_enough, polish

__all__ = ["Contender", "Solution", "Values", "solve"]


@dataclass(frozen=True, slots=True)
class Solution:
    placements: list[Placement]
    value: float
    bound: float
    """No answer over the same menus is worth more."""


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
    menus = Menus(node_gpus, contenders, values, max_nodes)
    sizes, bound = _walk(menus, contenders, sum(node_gpus))

    def blank() -> State:
        board = FreeGpus(node_gpus, max_nodes=max_nodes, avoid_interference=avoid_interference)
        state = State(board, contenders, menus)
        for job, one in enumerate(contenders):
            if one.stays:
                state.set(job, one.held)
        return state

    state = _packed(blank(), sizes)
    polish(state, bound)
    best = Solution(state.placements, sum(state.value), bound)
    if not good_enough(state, bound):
        state = _as_it_is(blank())
        polish(state, bound)
        if sum(state.value) > best.value:
            best = Solution(state.placements, sum(state.value), bound)
    return best


def _walk(menus: Menus, contenders: Sequence[Contender], capacity: int) -> tuple[list[int | None], float]:
    """The walk's size for each job (None: as it is), and its bound.

    While a job takes the last size on its menu, menus are extended and the walk is repeated.
    """
    offers = [_offer(menus, job, one) for job, one in enumerate(contenders)]
    hulls = [upper_hull(offer) for offer in offers]
    while True:
        walk = hull_walk(offers, capacity, hulls)
        sizes: list[int | None] = []
        at_end = []
        for job, (one, offer, pick) in enumerate(zip(contenders, offers, walk.chosen, strict=True)):
            as_it_is = bool(one.held) and (one.stays or pick == 1)
            sizes.append(None if as_it_is else offer[pick][0])
            if not as_it_is and menus.sizes[job] and offer[pick][0] == menus.sizes[job][-1]:
                at_end.append(job)
        reach = 2 * max((menus.sizes[job][-1] for job in at_end), default=0)
        if not at_end or not menus.extend(at_end, reach):
            return sizes, walk.bound
        for job in at_end:
            offers[job] = _offer(menus, job, contenders[job])
            hulls[job] = upper_hull(offers[job])


def _offer(menus: Menus, job: int, one: Contender) -> list[Choice]:
    """Nothing, staying as it is where there is something to stay with, and every size on the menu."""
    keep = [(sum(count for _, count in one.held), menus.keep[job])] if one.held else []
    if one.stays:
        return keep
    return [(0, menus.nothing[job]), *keep, *menus.worth[job].items()]


def _packed(state: State, sizes: Sequence[int | None]) -> State:
    movers = []
    for job, size in enumerate(sizes):
        held = state.contenders[job].held
        if state.contenders[job].stays:
            continue
        if size is None and state.board.fits(held):
            state.set(job, held)
        else:
            movers.append((sum(count for _, count in held) if size is None else size, job))
    unplaced = []
    for size, job in sorted(movers, key=lambda mover: (-mover[0], mover[1])):
        placement = state.find(job, size)
        if placement is None:
            unplaced.append(job)
        else:
            state.set(job, placement)
    for job in unplaced:
        state.set(job, state.best(job))
    return state


def _as_it_is(state: State) -> State:
    for job, one in enumerate(state.contenders):
        if one.held and not one.stays and state.board.fits(one.held):
            state.set(job, one.held)
    return state
