"""Nodes that come and go, times in which nobody drove a run, and when it was to end: behind its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.app.history import Gap, History
from stretto.core.units import format_duration
from stretto.report.plotting import TimeUnit, graph_objects, safe
from stretto.report.slots import Rows

STARTING = ("node starting", "#f6e3b4")
IDLE = ("node idle", "#dfe3e8")
UNDRIVEN = ("nobody drove the run", "#f4d5cc")
EXPECTED = ("expected end", "#59636e")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a node's stay."""

    node: str
    start_s: float
    end_s: float


def node_bars(history: History, rows: Rows, end_s: float, unit: TimeUnit) -> Iterator[Any]:
    """Bars of nodes that were not there from the start: while they start up, and where nobody uses them.

    They leave out when nobody drove the run, and end with it.
    """
    came, until_s = [stay for stay in history.nodes if stay.came], min(history.end_s, end_s)
    starting = [_Piece(one.node.id, one.start_s, min(one.ready_s, one.end_s, until_s)) for one in came]
    there = [_Piece(one.node.id, one.ready_s, min(one.end_s, until_s)) for one in came]
    for (name, colour), pieces in ((STARTING, starting), (IDLE, there)):
        shown = [part for piece in pieces for part in _driven(piece, history.gaps)]
        if drawn := [piece for piece in shown if piece.node in rows.nodes]:
            yield _bars(name, colour, drawn, rows, unit)


def with_gaps(figure: Any, gaps: Sequence[Gap], unit: TimeUnit) -> Any:
    """The figure with the times in which nobody drove the run."""
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
    """The figure with a line where the run was to end."""
    name, colour = EXPECTED
    figure.add_vline(x=finish_s / unit.seconds, line={"color": colour, "dash": "dash", "width": 1.4})
    marker = {"symbol": "line-ns", "size": 12, "line": {"color": colour, "width": 1.4}}
    return _in_legend(figure, f"{name}, {format_duration(finish_s)}", marker)


def _in_legend(figure: Any, name: str, marker: dict[str, Any]) -> Any:
    """A point that is not there: shapes have no place in a legend."""
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, showlegend=True)
    return figure


def _driven(piece: _Piece, gaps: Sequence[Gap]) -> Iterator[_Piece]:
    """What is left of a piece without the gaps, which are in order of time."""
    start_s = piece.start_s
    for gap in gaps:
        if gap.start_s >= piece.end_s:
            break
        if start_s < gap.start_s:
            yield _Piece(piece.node, start_s, gap.start_s)
        start_s = max(start_s, gap.end_s)
    if start_s < piece.end_s:
        yield _Piece(piece.node, start_s, piece.end_s)


def _bars(name: str, colour: str, pieces: Sequence[_Piece], rows: Rows, unit: TimeUnit) -> Any:
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
