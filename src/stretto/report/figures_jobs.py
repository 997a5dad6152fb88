"""How long jobs took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.app.simulate import Run
from stretto.core.units import format_duration
from stretto.report.palette import Palette
from stretto.report.plotting import duration_axis, graph_objects, safe, styled


def completion_shares(runs: Sequence[tuple[str, Run]], palette: Palette) -> Any:
    """Share of all jobs that ended within a time; a curve that ends below 100 % left jobs unfinished."""
    go = graph_objects()
    figure = go.Figure()
    every: list[float] = []
    for label, run in runs:
        jcts = sorted(job.jct_s for job in run.history.jobs.values() if job.jct_s is not None)
        every.extend(jcts)
        style = palette.policy(label)
        share = 100.0 * np.arange(1, len(jcts) + 1) / max(len(run.history.jobs), 1)
        figure.add_scatter(
            x=jcts[:1] + jcts,
            y=[0.0, *share],
            name=safe(label),
            mode="lines",
            line={"color": style.colour, "dash": style.dash, "width": 2.2, "shape": "hv"},
            customdata=[format_duration(jct) for jct in jcts[:1] + jcts],
            hovertemplate="%{y:.0f} % within %{customdata}",
        )
    figure.update_xaxes(title_text="job completion time", **_range(every))
    figure.update_yaxes(title_text="share of jobs (%)", range=[0, 102])
    return styled(figure, 380)


def completion_by_application(runs: Sequence[tuple[str, Run]], palette: Palette) -> Any:
    """Quartiles of completion times by application; dots are jobs far from the others."""
    go = graph_objects()
    figure = go.Figure()
    every: list[float] = []
    for label, run in runs:
        done = [
            (safe(job.job.application), job.jct_s)
            for job in run.history.jobs.values()
            if job.jct_s is not None
        ]
        done.sort()
        every.extend(jct for _, jct in done)
        colour = palette.policy(label).colour
        figure.add_box(
            x=[application for application, _ in done],
            y=[jct for _, jct in done],
            name=safe(label),
            marker={"color": colour, "size": 4},
            line={"width": 1.4},
            hoverinfo="skip",
        )
    figure.update_yaxes(title_text="job completion time", **_range(every))
    figure.update_xaxes(type="category")
    return styled(figure, 400, boxmode="group", boxgap=0.25, boxgroupgap=0.15)


def _range(jcts: Sequence[float]) -> dict[str, Any]:
    return duration_axis(min(jcts), max(jcts)) if jcts else {}
