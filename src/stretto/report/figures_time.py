"""A workload under its policies over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.app.simulate import Run
from stretto.models.speed import Floats
from stretto.report.palette import Palette
from stretto.report.plotting import doubling_axis, panels, safe, styled
from stretto.report.timeline import Timeline, sample, time_grid

CELLS = 180


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    values: Callable[[Timeline], Floats]


PANELS = (
    Panel("Jobs waiting", "jobs", lambda line: line.waiting),
    Panel("GPUs held", "share of the cluster (%)", lambda line: 100.0 * line.utilisation),
    Panel("Throughput", "jobs of work per hour", lambda line: line.throughput),
    Panel("Statistical efficiency", "mean of running jobs (%)", lambda line: 100.0 * line.efficiency),
    Panel("Goodput", "jobs of work per hour", lambda line: line.goodput),
    Panel("Batch size", "total / initial, mean of jobs", lambda line: line.batch_scale),
)


def timelines(runs: Sequence[tuple[str, Run]], end_s: float) -> list[tuple[str, Timeline]]:
    """All on one grid, so that lines can be compared."""
    grid = time_grid(end_s, CELLS)
    return [(label, sample(run.history, run.setup.nodes, grid)) for label, run in runs]


def over_time(lines: Sequence[tuple[str, Timeline]], palette: Palette) -> Any:
    """Six panels with a line per policy, each point the mean of its cell of the grid."""
    figure = panels(3, 2, [panel.title for panel in PANELS], shared_xaxes="all", vertical_spacing=0.085)
    for index, panel in enumerate(PANELS):
        row, column = divmod(index, 2)
        place = {"row": row + 1, "col": column + 1}
        for label, line in lines:
            style = palette.policy(label)
            figure.add_scatter(
                x=np.round(line.middles_s / 3600.0, 4).tolist(),
                y=_numbers(panel.values(line)),
                name=safe(label),
                legendgroup=label,
                showlegend=index == 0,
                mode="lines",
                line={"color": style.colour, "dash": style.dash, "width": 1.8},
                hovertemplate="%{y:.3~g} at %{x:.2f} h",
                **place,
            )
        scale = {"range": [0, 103]} if "%" in panel.unit else {"rangemode": "tozero"}
        figure.update_yaxes(title_text=panel.unit, **scale, **place)
    end_s = max((line.edges_s[-1] for _, line in lines), default=1.0)
    figure.update_xaxes(range=[0, end_s / 3600.0])
    figure.update_xaxes(title_text="time (hours)", row=3)
    figure.update_yaxes(**doubling_axis(PANELS[-1].unit), range=_batch_range(lines), row=3, col=2)
    if not any(np.isfinite(line.efficiency).any() for _, line in lines):
        figure.add_annotation(
            text="no job reported gradient statistics",
            showarrow=False,
            xref="x domain",
            yref="y domain",
            x=0.5,
            y=0.5,
            row=2,
            col=2,
        )
    return styled(figure, 820)


def _batch_range(lines: Sequence[tuple[str, Timeline]]) -> list[float]:
    """Logarithms of the ends of the axis: at least one doubling, so that rounding looks like nothing."""
    scales = np.concatenate([[1.0, 2.0], *(line.batch_scale for _, line in lines)])
    return [float(np.log10(np.nanmin(scales) / 1.1)), float(np.log10(np.nanmax(scales) * 1.1))]


def _numbers(values: Floats) -> list[float | None]:
    """Four digits are enough for the eye, and NaN is a gap."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]
