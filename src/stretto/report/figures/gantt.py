"""The Gantt chart: which job held which GPUs when, with nodes that come and go in the background.

An allocation says how many GPUs of a node a job holds, not which. For drawing we assign rows: a job keeps its
rows on a node while it holds as many GPUs there, and takes the lowest free rows when it grows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stretto.core.cluster import Node
from stretto.core.job import Job
from stretto.core.resources import TOLERANCE
from stretto.core.units import counted, format_duration
from stretto.journal.folds.history import Gap, History, Hold
from stretto.report.plotting import Palette, TimeUnit, graph_objects, safe, styled, time_unit, wrapped


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the chart: the slots of all nodes, one node after another."""

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
    """The job's GPUs in total, on these rows and others."""
    batches: tuple[int, ...]
    """Total batch sizes, in the order of their use without a restart."""


def rows_of(nodes: Sequence[Node], history: History) -> Rows:
    """Rows for the cluster's nodes, for nodes that came later, and for any other node that a job held."""
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
    """The rows of every job over time, in order of time."""
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
    """Join consecutive holds with the same allocation, between which only the batch size changed."""
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
    """Which job has which rows at the current time of the sweep."""

    def __init__(self, rows: Rows) -> None:
        self._rows = {
            node: range(first, end)
            for node, first, end in zip(rows.nodes, rows.first, rows.ends, strict=True)
        }
        self._taken: dict[str, dict[str, list[int]]] = {}
        """Rows by node by job."""
        self._until_s: dict[str, float] = {}

    def leave(self, now_s: float, arriving: Sequence[tuple[Job, list[Hold]]]) -> None:
        """Free the rows given up by now, so that arriving jobs can take them."""
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
        # Jobs that use a fraction of a GPU may have to share a row.
        shared = [row for row in rows if row in busy and row not in kept]
        return [*kept, *[*free, *shared][: max(count - len(kept), 0)]]


def _gpus_by_node(job: Job, hold: Hold) -> dict[str, int]:
    """GPUs on each node; a fraction is drawn as a whole one."""
    uses = hold.allocation.uses(job)
    return {node: math.ceil(used.gpu - TOLERANCE) for node, used in uses.items() if used.gpu > TOLERANCE}


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of adjacent rows."""
    runs = []
    for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = [row for _, row in run]
        runs.append((members[0], len(members)))
    return runs


STARTING = ("node starting", "#f6e3b4")
IDLE = ("node idle", "#dfe3e8")
UNDRIVEN = ("no controller", "#f4d5cc")
EXPECTED = ("expected end", "#59636e")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A period of a node's life."""

    node: str
    start_s: float
    end_s: float


def node_bars(history: History, rows: Rows, end_s: float, unit: TimeUnit) -> Iterator[Any]:
    """Bars for nodes that came later: while they start up, and while they are idle.

    Periods without a controller are left out.
    """
    came, until_s = [stay for stay in history.nodes if stay.came], min(history.end_s, end_s)
    starting = [_Piece(one.node.id, one.start_s, min(one.ready_s, one.end_s, until_s)) for one in came]
    there = [_Piece(one.node.id, one.ready_s, min(one.end_s, until_s)) for one in came]
    for (name, colour), pieces in ((STARTING, starting), (IDLE, there)):
        shown = [part for piece in pieces for part in _driven(piece, history.gaps)]
        if drawn := [piece for piece in shown if piece.node in rows.nodes]:
            yield _node_bars(name, colour, drawn, rows, unit)


def with_gaps(figure: Any, gaps: Sequence[Gap], unit: TimeUnit) -> Any:
    """Mark the periods without a running controller."""
    name, colour = UNDRIVEN
    for gap in gaps:
        figure.add_vrect(
            x0=gap.start_s / unit.seconds,
            x1=gap.end_s / unit.seconds,
            fillcolor=colour,
            layer="below",
            line_width=0,
        )
    return _in_legend(figure, name, {"symbol": "square", "size": 12, "color": colour}) if gaps else figure


def with_expected(figure: Any, finish_s: float, unit: TimeUnit) -> Any:
    """Mark the expected end of the run with a line."""
    name, colour = EXPECTED
    figure.add_vline(x=finish_s / unit.seconds, line={"color": colour, "dash": "dash", "width": 1.4})
    marker = {"symbol": "line-ns", "size": 12, "line": {"color": colour, "width": 1.4}}
    return _in_legend(figure, f"{name}, {format_duration(finish_s)}", marker)


def _in_legend(figure: Any, name: str, marker: dict[str, Any]) -> Any:
    """Add an invisible point, because a shape has no legend entry of its own."""
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, showlegend=True)
    return figure


def _driven(piece: _Piece, gaps: Sequence[Gap]) -> Iterator[_Piece]:
    """The parts of a piece outside the gaps, which are in order of time."""
    start_s = piece.start_s
    for gap in gaps:
        if gap.start_s >= piece.end_s:
            break
        if start_s < gap.start_s:
            yield _Piece(piece.node, start_s, gap.start_s)
        start_s = max(start_s, gap.end_s)
    if start_s < piece.end_s:
        yield _Piece(piece.node, start_s, piece.end_s)


def _node_bars(name: str, colour: str, pieces: Sequence[_Piece], rows: Rows, unit: TimeUnit) -> Any:
    ends = dict(zip(rows.nodes, rows.ends, strict=True))
    firsts = dict(zip(rows.nodes, rows.first, strict=True))
    return graph_objects().Bar(
        orientation="h",
        base=[round(piece.start_s / unit.seconds, 5) for piece in pieces],
        x=[round((piece.end_s - piece.start_s) / unit.seconds, 5) for piece in pieces],
        y=[(firsts[piece.node] + ends[piece.node]) / 2 for piece in pieces],
        width=[ends[piece.node] - firsts[piece.node] for piece in pieces],
        marker={"color": colour, "line": {"width": 0}},
        customdata=[
            [
                f"node {safe(piece.node)}",
                f"{format_duration(piece.start_s)} to {format_duration(piece.end_s)}",
            ]
            for piece in pieces
        ],
        hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{customdata[1]}}<extra></extra>",
        name=name,
    )


SHADES = 3
MOST_LABELS = 32
FEW = 300
"""With fewer rectangles than this, borders are drawn wide."""
HOVER = (
    "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<br>"
    "<i>%{customdata[3]}</i><extra></extra>"
)


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of jobs, each drawn in shades of one colour."""

    names: Sequence[str]
    """In the order of the legend."""
    of: Callable[[Job], str]
    """The group of a job."""
    colour: Callable[[str, int], str]
    """The colour of a group in a shade: 0, 1 or 2."""


def by_application(history: History, palette: Palette) -> Groups:
    names = {job.job.application for job in history.jobs.values()}
    return Groups(sorted(names), lambda job: job.application, palette.application)


def gpus_over_time(
    history: History, nodes: Sequence[Node], groups: Groups, end_s: float, *, slot: str = "GPU"
) -> Any:
    """A rectangle for every period in which a job held GPUs: rows are GPUs, the colour is the job's group.

    One trace per group keeps a page with thousands of rectangles fast. Nodes that came later are drawn in the
    background. `slot` names the unit that jobs hold.
    """
    go, unit = graph_objects(), time_unit(end_s)
    rows = rows_of(nodes, history)
    reasons = _reasons(history)
    shades = {job_id: index % SHADES for index, job_id in enumerate(history.jobs)}
    grouped: defaultdict[str, list[Stay]] = defaultdict(list)
    for stay in stays_of(history, rows):
        grouped[groups.of(stay.job)].append(stay)
    figure = go.Figure(list(node_bars(history, rows, end_s, unit)))
    for group in groups.names:
        if grouped[group]:
            figure.add_trace(_legend_entry(go, group, groups))
            told = [
                [
                    safe(stay.job.id),
                    _holding(stay, slot),
                    _when(stay),
                    reasons.get((stay.job.id, stay.start_s), ""),
                ]
                for stay in grouped[group]
            ]
            figure.add_trace(
                _bars(go, group, grouped[group], groups=groups, shades=shades, told=told, unit=unit)
            )
    for first in rows.first[1:]:
        figure.add_shape(
            type="line",
            layer="below",
            xref="paper",
            x0=0,
            x1=1,
            y0=first,
            y1=first,
            line={"color": "#d5d9de", "width": 0.6},
        )
    figure.update_xaxes(**unit.axis(end_s))
    figure.update_yaxes(range=[max(rows.count, 1), 0], showgrid=False, **_labels(rows))
    height = min(max(6 * rows.count, 240), 900) + 130
    return styled(figure, height, barmode="overlay", hovermode="closest")


def jobs_without_gpus(history: History) -> int:
    """The number of jobs that ran without a GPU, which the chart cannot show."""
    return sum(
        bool(job.holds) and not any(hold.allocation.gpus(job.job) for hold in job.holds)
        for job in history.jobs.values()
    )


def _bars(
    go: Any,
    group: str,
    stays: Sequence[Stay],
    *,
    groups: Groups,
    shades: dict[str, int],
    told: Sequence[Sequence[str]],
    unit: TimeUnit,
) -> Any:
    return go.Bar(
        orientation="h",
        base=[round(stay.start_s / unit.seconds, 5) for stay in stays],
        x=[round((stay.end_s - stay.start_s) / unit.seconds, 5) for stay in stays],
        y=[stay.first_row + stay.rows / 2 for stay in stays],
        width=[stay.rows for stay in stays],
        marker={
            "color": [groups.colour(group, shades[stay.job.id]) for stay in stays],
            "line": {"color": "#ffffff", "width": 1.0 if len(stays) < FEW else 0.3},
        },
        customdata=told,
        hovertemplate=HOVER,
        legendgroup=group,
        showlegend=False,
    )


def _legend_entry(go: Any, group: str, groups: Groups) -> Any:
    """An empty bar whose legend entry shows the group's plain colour instead of a job's shade."""
    return go.Bar(
        x=[None],
        y=[None],
        orientation="h",
        name=safe(group),
        legendgroup=group,
        marker={"color": groups.colour(group, 0)},
    )


def _holding(stay: Stay, slot: str) -> str:
    first, last = stay.batches[0], stay.batches[-1]
    sizes = f"{first:,}" if len(stay.batches) == 1 else f"{first:,} to {last:,}"
    return f"{counted(stay.gpus, slot)}, batch {sizes}"


def _when(stay: Stay) -> str:
    start, end = format_duration(stay.start_s), format_duration(stay.end_s)
    return f"{start} to {end} ({format_duration(stay.end_s - stay.start_s)})"


def _reasons(history: History) -> dict[tuple[str, float], str]:
    """The reason for each allocation, by job and time."""
    return {
        (job_id, decided.t_s): f"{reason.code.value}: {wrapped(reason.text)}"
        for decided in history.decisions
        for job_id, reason in decided.reasons.items()
    }


def _labels(rows: Rows) -> dict[str, Any]:
    """A label in the middle of each node's rows, or of every second, third, .. of many nodes."""
    every = max(-(-len(rows.nodes) // MOST_LABELS), 1)
    shown = [
        ((first + end) / 2, f"node {safe(node)}")
        for node, first, end in list(zip(rows.nodes, rows.first, rows.ends, strict=True))[::every]
        if end > first
    ]
    return {"tickvals": [at for at, _ in shown], "ticktext": [text for _, text in shown]}
