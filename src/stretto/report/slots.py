"""Which GPU of a node a job sits on.

An allocation says how many GPUs of a node a job holds, not which. For drawing, every job is given slots:
it keeps those it has while it holds as many on that node, and takes the lowest free ones when it grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from stretto.app.history import History, Hold
from stretto.core.cluster import Node
from stretto.core.job import Job
from stretto.core.resources import TOLERANCE


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the picture: the slots of all nodes, one node after another."""

    nodes: tuple[str, ...]
    first: tuple[int, ...]
    """The first row of each node."""
    count: int

    @property
    def ends(self) -> tuple[int, ...]:
        """The row after each node's last."""
        return (*self.first[1:], self.count) if self.first else ()


@dataclass(frozen=True, slots=True)
class Stay:
    """A job on adjacent rows for some time, with one allocation."""

    job: Job
    start_s: float
    end_s: float
    first_row: int
    rows: int
    gpus: int
    """All that the job holds, on these rows and others."""
    batches: tuple[int, ...]
    """Total batch sizes, in order; one after another without a restart."""


def rows_of(nodes: Sequence[Node], history: History) -> Rows:
    """Rows for the nodes of the cluster, for those that came later, and for others that somebody held."""
    came = [stay.node for stay in history.nodes if stay.ready_s < math.inf]
    sizes = {node.id: node.gpus for node in (*came, *nodes)}
    cluster = frozenset(sizes)
    for job in history.jobs.values():
        for hold in job.holds:
            for node, count in _gpus_by_node(job.job, hold).items():
                if node not in cluster:
                    sizes[node] = max(sizes.get(node, 0), count)
    first, total = [], 0
    for size in sizes.values():
        first.append(total)
        total += size
    return Rows(tuple(sizes), tuple(first), total)


def stays_of(history: History, rows: Rows) -> list[Stay]:
    """Every job's place over time, in order of time."""
    board = _Board(rows)
    pieces = sorted(
        (
            (piece[0].start_s, job.job.id, job.job, piece)
            for job in history.jobs.values()
            for piece in _pieces(job.holds)
        ),
        key=lambda item: item[:2],
    )
    stays: list[Stay] = []
    for start_s, batch in groupby(pieces, key=lambda item: item[0]):
        arriving = [(job, piece) for _, _, job, piece in batch]
        board.leave(start_s, arriving)
        for job, piece in arriving:
            stays.extend(board.take(job, piece))
    return stays


def _pieces(holds: Sequence[Hold]) -> list[list[Hold]]:
    """Holds that follow one another with the same allocation belong together: only the batch changed."""
    pieces: list[list[Hold]] = []
    for hold in holds:
        if hold.seconds <= 0.0:
            continue
        last = pieces[-1][-1] if pieces else None
        if last and last.allocation == hold.allocation and last.end_s == hold.start_s:
            pieces[-1].append(hold)
        else:
            pieces.append([hold])
    return pieces


class _Board:
    """Who sits where at the time the sweep has come to."""

    def __init__(self, rows: Rows) -> None:
        self._rows = {
            node: range(first, end)
            for node, first, end in zip(rows.nodes, rows.first, rows.ends, strict=True)
        }
        self._taken: dict[str, dict[str, list[int]]] = {}
        """Rows by node by job."""
        self._until_s: dict[str, float] = {}

    def leave(self, now_s: float, arriving: Sequence[tuple[Job, list[Hold]]]) -> None:
        """Free what is given up by now, so that those who come find it."""
        keeps = {job.id: _gpus_by_node(job, piece[0]) for job, piece in arriving}
        for job_id, until_s in list(self._until_s.items()):
            if until_s > now_s:
                continue
            wanted = keeps.get(job_id, {}) if until_s == now_s else {}
            taken = self._taken.pop(job_id)
            kept = {node: rows[: wanted[node]] for node, rows in taken.items() if node in wanted}
            if kept:
                self._taken[job_id] = kept
            del self._until_s[job_id]

    def take(self, job: Job, piece: list[Hold]) -> list[Stay]:
        kept = self._taken.get(job.id, {})
        mine = {
            node: self._fill(node, kept.get(node, []), count)
            for node, count in _gpus_by_node(job, piece[0]).items()
        }
        self._taken[job.id] = mine
        self._until_s[job.id] = piece[-1].end_s
        workers = piece[0].allocation.worker_count
        batches = tuple(size for size, _ in groupby(hold.batch.total(workers) for hold in piece))
        return [
            Stay(job, piece[0].start_s, piece[-1].end_s, first, count, piece[0].allocation.gpus(job), batches)
            for first, count in _runs(sorted(row for taken in mine.values() for row in taken))
        ]

    def _fill(self, node: str, kept: list[int], count: int) -> list[int]:
        rows = self._rows[node]
        busy = {row for taken in self._taken.values() for row in taken.get(node, [])}
        free = [row for row in rows if row not in busy]
        # Jobs that take fractions of a GPU may not all find a free one: then they share.
        shared = [row for row in rows if row in busy and row not in kept]
        return [*kept, *[*free, *shared][: max(count - len(kept), 0)]]


def _gpus_by_node(job: Job, hold: Hold) -> dict[str, int]:
    """Slots on each node; a fraction of one is drawn as a whole."""
    uses = hold.allocation.uses(job)
    return {node: math.ceil(used.gpu - TOLERANCE) for node, used in uses.items() if used.gpu > TOLERANCE}


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of adjacent rows."""
    runs = []
    for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = [row for _, row in run]
        runs.append((members[0], len(members)))
    return runs
