"""Packs the trials of a stage on few nodes, so that the other nodes can be given back.

1. *Pattern*: a trial gets as many whole nodes as it fills; its remaining GPUs (its rest) share nodes with
   other rests. If the rests do not fit whole, some nodes form a chain: rests are laid end to end along it,
   so each lies on at most two nodes. Chains are as short as possible.
2. *Assignment*: nodes and trials are assigned to the places of the pattern so that few trials move.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from stretto.core.allocation import Allocation

Piece = tuple[int, int]
"""(place in the pattern, GPUs there); a place is later assigned to a node."""
Pattern = tuple[tuple[Piece, ...], ...]
"""The pieces of each trial."""

TRIES = 150
"""Orders of nodes that are tried: some tens of milliseconds at the end of a stage."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where every trial goes, and the nodes to give back."""

    allocations: dict[str, Allocation]
    released: tuple[str, ...]


def repack(
    nodes: Sequence[str], gpus_per_node: int, held: Mapping[str, Allocation], gpus: int, keep: int
) -> Packing:
    """Give every trial of `held` this many GPUs on `keep` of the nodes, which must have room for them.

    `held` has what each trial held before. Minimised in this order:

    1. the most nodes that any trial spans,
    2. the number of trials that span more nodes than they must,
    3. the number of trials that move (by a short search): a trial stays if its new nodes contain its old
       ones or lie within them.

    Of equal nodes the first are kept; trials that move fill the gaps from the first node on.
    """
    pattern = make_pattern(len(held), gpus, gpus_per_node, keep)
    order = _settle(list(nodes), keep, pattern, [frozenset(old.nodes) for old in held.values()])
    slots = [tuple((order[place], count) for place, count in pieces) for pieces in pattern]
    chosen = _seat(slots, held)
    rank = {node: position for position, node in enumerate(nodes)}
    return Packing(
        allocations={
            trial: Allocation(tuple(sorted(slots[chosen[trial]], key=lambda piece: rank[piece[0]])))
            for trial in held
        },
        released=tuple(node for node in nodes if node not in set(order[:keep])),
    )


def make_pattern(trials: int, gpus: int, gpus_per_node: int, nodes: int) -> Pattern:
    """Pieces for at least `trials` trials on `nodes` equal nodes, each spanning as few as possible."""
    if trials * gpus > nodes * gpus_per_node:
        raise ValueError(f"{trials} x {gpus} GPUs do not fit on {nodes} nodes of {gpus_per_node}")
    whole, rest = divmod(gpus, gpus_per_node)
    blocks = trials if rest else nodes // whole
    full = [tuple((block * whole + i, gpus_per_node) for i in range(whole)) for block in range(blocks)]
    if not rest:
        return tuple(full)
    first_shared = trials * whole
    rests = list(_rests(trials, rest, gpus_per_node, first_shared, nodes - first_shared))
    if not whole:
        return tuple(rests)
    return tuple(wholes + pieces for wholes, pieces in zip(full, rests, strict=False))


def _rests(trials: int, rest: int, gpus_per_node: int, first: int, nodes: int) -> Iterator[tuple[Piece, ...]]:
    """Pieces of rests smaller than a node, on the nodes from `first` on."""
    fitting, over = divmod(gpus_per_node, rest)
    lengths = _chains(trials - nodes * fitting, rest, over, nodes)
    for length in (*lengths, *[1] * (nodes - sum(lengths))):
        for index in range(length * gpus_per_node // rest):
            yield tuple(_laid(index * rest, rest, gpus_per_node, first))
        first += length


def _chains(extra: int, rest: int, over: int, nodes: int) -> tuple[int, ...]:
    """Lengths of the chains that hold `extra` more rests than fit whole, with the fewest spanning trials.

    A chain of k nodes has k * over GPUs beside its whole rests, and k - 1 trials that span nodes. For j more
    rests it needs ceil(j * rest / over) nodes. Short chains have fewer spanning trials but need more nodes. A
    chain for `over` more rests wastes nothing, so longer ones are never needed.
    """
    if extra <= 0:
        return ()
    lengths = {more: -(-more * rest // over) for more in range(1, min(extra, over) + 1)}
    best: list[dict[int, tuple[int, ...]]] = [{0: ()}]
    for target in range(1, extra + 1):
        found: dict[int, tuple[int, ...]] = {}
        for more, length in lengths.items():
            for used, chains in best[target - more].items() if more <= target else ():
                total = used + length
                if total <= nodes and (total not in found or len(chains) + 1 > len(found[total])):
                    found[total] = (length, *chains)
        best.append(found)
    return min(best[extra].items(), key=lambda item: (item[0] - len(item[1]), item[0]))[1]


def _laid(begin: int, count: int, gpus_per_node: int, first: int) -> Iterator[Piece]:
    while count:
        node, used = divmod(begin, gpus_per_node)
        here = min(count, gpus_per_node - used)
        yield first + node, here
        begin, count = begin + here, count - here


def _settle(nodes: list[str], keep: int, pattern: Pattern, homes: Sequence[frozenset[str]]) -> list[str]:
    """Nodes in the order of the pattern's places, followed by those to give back.

    The nodes with most trials are kept, which is best if all places are alike. If not, a search improves it.
    """
    rooted = [home for home in homes if home]
    on_node = {node: sum(node in home for home in rooted) for node in nodes}
    room = max(1, len(pattern) // keep)
    kept = set(sorted(nodes, key=lambda node: -min(on_node[node], room))[:keep])
    order = [node for node in nodes if node in kept] + [node for node in nodes if node not in kept]
    if all(len(pieces) == 1 for pieces in (*pattern, *rooted)):
        return order
    return _best_near(order, keep, pattern, rooted)


def _best_near(order: list[str], keep: int, pattern: Pattern, homes: Sequence[frozenset[str]]) -> list[str]:
    """Best-first search from an order of nodes to its neighbours."""
    best, best_fit = order, _fit(order, pattern, homes)
    seen = {tuple(order)}
    open_ends = [(-best_fit[0], -best_fit[1], 0, _neighbours(order, keep))]
    while open_ends and best_fit[0] < len(homes) and len(seen) < TRIES:
        other = next(open_ends[0][3], None)
        if other is None:
            heapq.heappop(open_ends)
        elif tuple(other) not in seen:
            fit = _fit(other, pattern, homes)
            heapq.heappush(open_ends, (-fit[0], -fit[1], len(seen), _neighbours(other, keep)))
            seen.add(tuple(other))
            if fit > best_fit:
                best, best_fit = other, fit
    return best


def _neighbours(order: list[str], keep: int) -> Iterator[list[str]]:
    """Orders with two nodes exchanged, or one node moved to another position."""
    for one, other in combinations(range(len(order)), 2):
        if one < keep:
            swapped = order.copy()
            swapped[one], swapped[other] = order[other], order[one]
            yield swapped
    for one, other in permutations(range(len(order)), 2):
        if min(one, other) < keep and abs(one - other) > 1:
            shifted = order.copy()
            shifted.insert(other, shifted.pop(one))
            yield shifted


def _fit(order: Sequence[str], pattern: Pattern, homes: Sequence[frozenset[str]]) -> tuple[int, int]:
    """How many trials can stay on their nodes, and how many nodes the others share with their best slot."""
    slots = [frozenset(order[place] for place, _ in pieces) for pieces in pattern]
    near = sum(max(len(home & slot) for slot in slots) for home in homes)
    return len(_match(slots, homes, {})), near


def _seat(slots: Sequence[tuple[tuple[str, int], ...]], held: Mapping[str, Allocation]) -> dict[str, int]:
    """The slot of every trial: first for trials whose nodes are unchanged, then for those that can stay."""
    sets = [frozenset(node for node, _ in pieces) for pieces in slots]
    trials = list(held)
    homes = [frozenset(held[trial].nodes) for trial in trials]
    seated: dict[int, int] = {}
    taken: set[int] = set()
    for number, home in enumerate(homes):
        same = next((slot for slot, nodes in enumerate(sets) if nodes == home and slot not in taken), None)
        if home and same is not None:
            seated[same] = number
            taken.add(same)
    seated = _match(sets, homes, seated)
    free = iter(slot for slot in range(len(slots)) if slot not in seated)
    chosen = {trials[number]: slot for slot, number in seated.items()}
    return {trial: chosen[trial] if trial in chosen else next(free) for trial in trials}


def _match(
    slots: Sequence[frozenset[str]], homes: Sequence[frozenset[str]], seated: dict[int, int]
) -> dict[int, int]:
    """Puts as many trials as possible in slots that contain their nodes or lie within them; last slots first.

    This is bipartite matching by augmenting paths.
    """
    liked = [
        [number for number, home in enumerate(homes) if home and (home <= nodes or nodes <= home)]
        for nodes in slots
    ]
    seated = dict(seated)
    slot_of = {number: slot for slot, number in seated.items()}

    def fill(slot: int, asked: set[int]) -> bool:
        for number in liked[slot]:
            if number in asked:
                continue
            asked.add(number)
            if number not in slot_of or fill(slot_of[number], asked):
                seated[slot], slot_of[number] = number, slot
                return True
        return False

    for slot in range(len(slots) - 1, -1, -1):
        if slot not in seated:
            fill(slot, set())
    return seated
