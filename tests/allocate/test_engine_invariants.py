"""What every answer of the engine keeps, whatever its value tables say: sizes, room, and who may not move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import make_job, make_node
from stretto.allocate import menus
from stretto.allocate.even_spread import JobToPlace, place_all, spread_or_pack
from stretto.allocate.free import FreeCapacity
from stretto.allocate.marginal import Claim, RemainingTime, TaskCounts, share_out
from stretto.allocate.placements import EMPTY, Placement
from stretto.allocate.solver import Contender, Solution, solve
from stretto.core.allocation import NOTHING, Allocation
from stretto.core.job import Role
from stretto.core.resources import Resources
from stretto.models.goodput import Ints
from stretto.models.speed import Floats

MOST_GPUS = 40
MENUS = ((menus.FULL_MENU, menus.DENSE_MENU), (0, menus.DENSE_MENU), (0, 0))
"""Complete from the start, grown on demand, and grown by whole nodes."""


@dataclass(frozen=True)
class Table:
    """Any values at all, by job, nodes and GPUs."""

    nothing: Floats
    keep: Floats
    by_size: Floats

    def changed(self, job: Ints, nodes: Ints, gpus: Ints) -> Floats:
        assert (gpus > 0).all()
        assert (nodes > 0).all()
        return np.asarray(self.by_size[job, nodes - 1, gpus - 1])

    def of(self, job: int, placement: Placement, held: Placement) -> float:
        if not placement:
            return float(self.nothing[job])
        if placement == held:
            return float(self.keep[job])
        return float(self.by_size[job, len(placement) - 1, size_of(placement) - 1])


@dataclass(frozen=True)
class Case:
    node_gpus: list[int]
    contenders: list[Contender]
    values: Table
    max_nodes: int
    avoid: bool

    @staticmethod
    def of(seed: int) -> Case:
        """Jobs of any limits; what they hold may be outside of them, spread anyhow, and pinned."""
        rng = np.random.default_rng(seed)
        node_gpus = [int(gpus) for gpus in rng.integers(0, 8, size=rng.integers(1, 6))]
        free = list(node_gpus)
        contenders = []
        for _ in range(rng.integers(1, 10)):
            least = int(rng.integers(0, 4))
            most = max(least, 1) + int(rng.integers(0, 10))
            held = _some_of(free, rng) if rng.random() < 0.5 else EMPTY
            contenders.append(Contender(held, least, most, bool(rng.random() < 0.2)))
        return Case(
            node_gpus,
            contenders,
            _table(rng, len(contenders)),
            max_nodes=int(rng.integers(1, 6)),
            avoid=bool(rng.random() < 0.5),
        )


def _some_of(free: list[int], rng: np.random.Generator) -> Placement:
    """Up to five of the free GPUs, which it takes."""
    held: Counter[int] = Counter()
    for _ in range(rng.integers(1, 6)):
        open_nodes = [node for node, gpus in enumerate(free) if gpus]
        if open_nodes:
            node = int(rng.choice(open_nodes))
            free[node] -= 1
            held[node] += 1
    return tuple(sorted(held.items()))


def _table(rng: np.random.Generator, jobs: int) -> Table:
    """Ups and downs, or rising; some with ties; large or tiny."""
    scale = float(rng.choice([1.0, 1e6, 1e-6]))
    values = rng.normal(size=(jobs, 6, MOST_GPUS)) * scale
    keep = rng.normal(size=jobs) * scale
    if rng.random() < 0.5:
        values, keep = np.sort(values, axis=2), keep + 1.5 * scale
    if rng.random() < 0.5:
        values = np.round(values / scale, 1) * scale
    return Table(values[:, 0, 0] - 3.0 * scale * (rng.random() < 0.7), keep, values)


def size_of(placement: Placement) -> int:
    return sum(count for _, count in placement)


def broken(case: Case, solution: Solution) -> list[str]:
    """Every promise that the answer breaks."""
    pairs = list(zip(case.contenders, solution.placements, strict=True))
    found = [promise for one, placement in pairs for promise in _broken_to(one, placement, case.max_nodes)]
    used, spanning, forced = Counter[int](), Counter[int](), Counter[int]()
    for one, placement in pairs:
        for node, count in placement:
            used[node] += count
            spanning[node] += len(placement) > 1
            forced[node] += len(placement) > 1 and one.stays
    if any(used[node] > gpus for node, gpus in enumerate(case.node_gpus)):
        found.append("more than a node has")
    if case.avoid and any(spanning[node] > max(forced[node], 1) for node in spanning):
        found.append("two jobs that span on one node")
    if not found:
        worth = sum(case.values.of(job, placement, one.held) for job, (one, placement) in enumerate(pairs))
        if solution.value != pytest.approx(worth, rel=1e-9, abs=1e-9):
            found.append("a value that is not the sum of its jobs'")
    return found


def _broken_to(one: Contender, placement: Placement, max_nodes: int) -> Iterator[str]:
    """Promises to one job."""
    if one.stays and placement != one.held:
        yield "a pinned job was changed"
    if list(placement) != sorted(dict(placement).items()):
        yield "a node twice, or out of order"
    if any(count < 1 for _, count in placement):
        yield "a count below one"
    if placement and placement != one.held:
        if not max(one.min_gpus, 1) <= size_of(placement) <= one.max_gpus:
            yield "a size that the job does not take"
        if len(placement) > max_nodes:
            yield "too many nodes"


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.sampled_from(MENUS))
@example(5039, MENUS[0])  # a donor that an earlier shift had left with nothing gave once more
@example(52, MENUS[0])  # a job was moved with the size it held, which it does not take
@example(139, MENUS[0])
def test_every_answer_keeps_all_limits(seed: int, sizes: tuple[int, int]) -> None:
    case = Case.of(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(menus, "FULL_MENU", sizes[0])
        patch.setattr(menus, "DENSE_MENU", sizes[1])
        solution = solve(
            case.node_gpus,
            case.contenders,
            case.values,
            max_nodes=case.max_nodes,
            avoid_interference=case.avoid,
        )
    assert broken(case, solution) == []


counts = st.tuples(st.integers(1, 4), st.integers(0, 3))


def _from(times_s: Floats) -> RemainingTime:
    return lambda workers, servers: float(times_s[workers, servers])


@given(
    st.lists(
        st.tuples(counts, counts, st.lists(counts, max_size=2), counts, st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 30),
)
def test_shares_are_within_every_claim_and_what_is_free(
    drawn: list[tuple[TaskCounts, TaskCounts, list[TaskCounts], TaskCounts, int]], cpus: int
) -> None:
    """Of any remaining times, with counts to be tried out, and from what is held."""
    claims = []
    for least, more, targets, held, seed in drawn:
        times = np.random.default_rng(seed).choice([1.0, 2.0, 50.0, np.inf], size=(20, 20))
        claims.append(
            Claim(
                worker=Resources(cpu=1),
                server=Resources(cpu=1),
                least=least,
                most=(least[0] + more[0], least[1] + more[1]),
                targets=tuple((least[0] + min(w, more[0]), least[1] + min(p, more[1])) for w, p in targets),
                remaining_s=_from(times),
                held=held,
                resize_s=1.0,
            )
        )
    shares = share_out(claims, Resources(cpu=cpus), Resources(cpu=cpus))
    assert sum(w + p for w, p in shares) <= cpus
    for claim, share in zip(claims, shares, strict=True):
        if share != (0, 0):
            assert claim.least[0] <= share[0] <= claim.most[0]
            assert claim.least[1] <= share[1] <= claim.most[1]


@given(
    st.lists(st.tuples(counts, st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
)
def test_seats_beside_jobs_that_hold_something_have_room(
    drawn: list[tuple[tuple[int, int], int, bool]], cpus: list[int]
) -> None:
    nodes = [make_node(str(number), cpu=count) for number, count in enumerate(cpus)]
    room, task = FreeCapacity(nodes), Resources(cpu=1)
    seats = []
    for number, (wanted, where, holds) in enumerate(drawn):
        job = make_job(
            str(number), 1, demand=task, most=8, server=Role(demand=task, min=0, max=8) if wanted[1] else None
        )
        node = str(where % len(nodes))
        servers = ((node, wanted[1]),) if wanted[1] else ()
        held = Allocation(((node, wanted[0]),), servers) if holds else NOTHING
        if held and room.holds(job, held):
            room.take(job, held)
        else:
            held = NOTHING
        seats.append(JobToPlace(job=job, wanted=wanted, least=(1, min(wanted[1], 1)), held=held))
    left = FreeCapacity(nodes)
    placed = place_all(seats, FreeCapacity(nodes), spread_or_pack)
    for seat in seats:
        if (place := placed.get(seat.job.id)) is not None:
            assert left.holds(seat.job, place)
            left.take(seat.job, place)
            assert all(count > 0 for _, count in (*place.workers, *place.servers))
            assert seat.least[0] <= place.worker_count <= seat.wanted[0]
            assert seat.least[1] <= place.server_count <= seat.wanted[1]
    if all(seat.stays for seat in seats):
        assert placed == {seat.job.id: seat.held for seat in seats}
