"""The solver: how many GPUs each job gets, and on which nodes, so that the sum of values is largest.

1. *Walk.* Choosing a size for each job, without regard to nodes, is a multiple-choice knapsack. The hull walk
   (hull.py) solves it up to the last item, and gives a bound that no placement exceeds. Keeping a job exactly
   as it is counts as a choice, and is the only one without a restart penalty.
2. *Pack.* Jobs that keep what they have stay in place. The others are packed on the fewest nodes, largest
   first (placements.py). A job that does not fit gets the best smaller size that does.
3. *Polish.* Local search on real placements (polish.py) raises the sum of values until it reaches the bound
   or nothing helps. It starts from the packed answer. If that ends below the bound, it starts once more from
   the present state, which is always feasible and often nearly optimal; the better result wins.

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
    """No answer with the same menus has a higher value."""


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
        free = FreeGpus(node_gpus, max_nodes=max_nodes, avoid_interference=avoid_interference)
        state = State(free, contenders, menus)
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
    """The walk's size for each job (None: keep it as it is), and its bound.

    While a job takes the last size of its menu, the menu is extended and the walk is repeated.
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
    """A job's choices: nothing, what it holds if it holds something, and every size on its menu."""
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
        if size is None and state.free.fits(held):
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
        if one.held and not one.stays and state.free.fits(one.held):
            state.set(job, one.held)
    return state
