"""Who held which GPUs when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.app.history import History
from stretto.core.cluster import Node
from stretto.core.job import Job
from stretto.core.units import counted, format_duration
from stretto.report.figures_nodes import node_bars
from stretto.report.palette import Palette
from stretto.report.plotting import TimeUnit, graph_objects, safe, styled, time_unit, wrapped
from stretto.report.slots import Rows, Stay, rows_of, stays_of

SHADES = 3
MOST_LABELS = 32
FEW = 300
"""Rectangles that are large enough for borders to be seen."""
HOVER = (
    "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<br>"
    "<i>%{customdata[3]}</i><extra></extra>"
)


@dataclass(frozen=True, slots=True)
class Groups:
    """Jobs that are drawn in shades of one colour."""

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
    """A rectangle for every time a job held GPUs: rows are GPUs, the colour is the job's group.

    One trace of bars per group keeps a page with thousands of rectangles quick. Behind them are the nodes
    that came on the way. `slot` is what the unit that jobs hold is called.
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
    """Jobs that held something, but never a GPU: the picture cannot show them."""
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
    """A bar that is not there: the swatch shows the plain colour, not that of some job's shade."""
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
    """What was said when a job's allocation was decided, by job and time."""
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
