"""Figures of simulated jobs: completion times, and a workload under its policies over time.

Everything is a sum over jobs of functions that are constant between events, so that means are exact.

    goodput      rate of progress between two reports / total work of the job, x 3600: jobs of work per hour.
                 It is spread over the time the job held something, starting and resizing left out
                 where reports told how long that took; work that was lost counts negatively.
    efficiency   gain(batch) / scale = (phi + M0) / (phi + M) at the total batch M, with the gradient
                 statistics of the report that ends the time in question
    throughput   goodput / efficiency, job by job: the work per hour if every example counted in full
    total work   work done at the end of a job that finished, else as many units as its owner asked for

A job that reports no gradient statistics has no part in the mean efficiency, and its throughput is its
goodput. A job that did not finish and whose work is unknown has no goodput; `uncounted` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.core.cluster import Node
from stretto.core.observations import NoiseSample
from stretto.core.units import format_duration
from stretto.journal.folds.history import History, Hold, JobHistory
from stretto.models.noise import GradientNoise
from stretto.models.speed import Floats
from stretto.report.plotting import Palette, doubling_axis, duration_axis, graph_objects, panels, safe, styled
from stretto.simulation.jobs import SimulationResult


def completion_shares(runs: Sequence[tuple[str, SimulationResult]], palette: Palette) -> Any:
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


def completion_by_application(runs: Sequence[tuple[str, SimulationResult]], palette: Palette) -> Any:
    """Quartiles of completion times by application; dots are outliers."""
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


SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Span:
    """A constant value over a period."""

    start_s: float
    end_s: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One number per cell of the time grid; NaN where there is no data."""

    edges_s: Floats
    waiting: Floats
    """Waiting jobs: submitted, unfinished, and without resources."""
    gpus_held: Floats
    utilisation: Floats
    """Share of the cluster's GPUs that is held."""
    throughput: Floats
    goodput: Floats
    efficiency: Floats
    """Mean over the training jobs."""
    batch_scale: Floats
    """Total batch / initial batch, averaged over the jobs that hold resources."""
    uncounted: tuple[str, ...] = ()

    @property
    def middles_s(self) -> Floats:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2.0


def time_grid(end_s: float, cells: int) -> Floats:
    """The edges of equal cells from 0 to the end."""
    return np.linspace(0.0, max(end_s, 1.0), cells + 1)


def sample(history: History, nodes: Sequence[Node], edges_s: Floats) -> Timeline:
    """The timeline of a run on a cluster."""
    jobs = list(history.jobs.values())
    training = [span for job in jobs for span in training_of(job)]
    efficient = [span for span in training if span.efficiency is not None]
    gpus_held = cell_means((span for job in jobs for span in gpus_of(job)), edges_s)
    capacity = sum(node.gpus for node in nodes)
    return Timeline(
        edges_s=edges_s,
        waiting=cell_means((span for job in jobs for span in waits_of(job, history.end_s)), edges_s),
        gpus_held=gpus_held,
        utilisation=gpus_held / capacity if capacity else np.full_like(gpus_held, np.nan),
        throughput=cell_means((span.at(span.throughput) for span in training), edges_s),
        goodput=cell_means((span.at(span.goodput) for span in training), edges_s),
        efficiency=_mean_of([span.at(span.efficiency or 0.0) for span in efficient], edges_s),
        batch_scale=_mean_of([span for job in jobs for span in batch_scales_of(job)], edges_s),
        uncounted=tuple(job.job.id for job in jobs if total_work(job) is None),
    )


def cell_means(spans: Iterable[Span], edges_s: Floats) -> Floats:
    """The sum of the spans, averaged over each cell."""
    table = np.array([(span.start_s, span.end_s, span.value) for span in spans]).reshape(-1, 3)
    if not table.size:
        return np.zeros(len(edges_s) - 1)
    times_s = np.concatenate([table[:, 0], table[:, 1]])
    changes = np.concatenate([table[:, 2], -table[:, 2]])
    order = np.argsort(times_s, kind="stable")
    times_s = times_s[order]
    level = np.cumsum(changes[order])
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times_s))])
    means: Floats = np.diff(np.interp(edges_s, times_s, area)) / np.diff(edges_s)
    return means


def waits_of(job: JobHistory, end_s: float) -> Iterator[Span]:
    """The periods in which the job waited without resources."""
    over_s = end_s if job.end_s is None else job.end_s
    since_s = job.job.submit_s
    for hold in job.holds:
        if hold.start_s > since_s:
            yield Span(since_s, hold.start_s, 1.0)
        since_s = max(since_s, hold.end_s)
    if over_s > since_s:
        yield Span(since_s, over_s, 1.0)


def gpus_of(job: JobHistory) -> Iterator[Span]:
    """GPUs the job held."""
    for hold in job.holds:
        yield Span(hold.start_s, hold.end_s, hold.allocation.gpus(job.job))


def batches_of(job: JobHistory) -> Iterator[Span]:
    """Total batch size of the job while it held something."""
    for hold in job.holds:
        yield Span(hold.start_s, hold.end_s, hold.batch.total(hold.allocation.worker_count))


def batch_scales_of(job: JobHistory) -> Iterator[Span]:
    """Total batch size relative to the initial one."""
    for span in batches_of(job):
        yield Span(span.start_s, span.end_s, span.value / job.job.batch.initial)


@dataclass(frozen=True, slots=True)
class Training:
    """A period in which a job progressed at a constant rate."""

    start_s: float
    end_s: float
    goodput: float
    """Jobs of work per hour; 0 where the job's total work is unknown."""
    efficiency: float | None

    @property
    def throughput(self) -> float:
        return self.goodput / self.efficiency if self.efficiency else self.goodput

    def at(self, value: float) -> Span:
        return Span(self.start_s, self.end_s, value)


def training_of(job: JobHistory) -> Iterator[Training]:
    """Progress between reports, spread evenly over the time that the job trained."""
    total = total_work(job)
    since_s, done = job.job.submit_s, 0.0
    for report in job.progress:
        trained = list(_trained_between(job.holds, since_s, report.t_s))
        trained_s = sum(end_s - start_s for start_s, end_s, _ in trained)
        if trained_s <= 0.0:
            # A report without such time before it adds to the next one.
            continue
        rate = (report.work_done - done) / trained_s
        goodput = SECONDS_PER_HOUR * rate / total if total else 0.0
        for start_s, end_s, hold in trained:
            yield Training(start_s, end_s, goodput, _efficiency(job, hold, report.noise))
        since_s, done = report.t_s, report.work_done


def total_work(job: JobHistory) -> float | None:
    """Statistical units of the whole job."""
    if job.finished_s is not None and job.progress:
        return job.progress[-1].work_done
    return job.job.work.total_units


def _trained_between(
    holds: Sequence[Hold], start_s: float, end_s: float
) -> Iterator[tuple[float, float, Hold]]:
    for hold in holds:
        ready_s = max(hold.start_s, hold.ready_s) if math.isfinite(hold.ready_s) else hold.start_s
        low_s, high_s = max(ready_s, start_s), min(hold.end_s, end_s)
        if low_s < high_s:
            yield low_s, high_s, hold


def _efficiency(job: JobHistory, hold: Hold, noise: NoiseSample | None) -> float | None:
    if noise is None or not (math.isfinite(noise.sqr) and math.isfinite(noise.var)):
        return None
    model = GradientNoise(noise.sqr, noise.var, job.job.batch.initial)
    return float(model.efficiency(hold.batch.total(hold.allocation.worker_count)))


def _mean_of(spans: Sequence[Span], edges_s: Floats) -> Floats:
    """The mean of the spans that cover a cell; NaN for cells with almost none."""
    count = cell_means((Span(span.start_s, span.end_s, 1.0) for span in spans), edges_s)
    total = cell_means(spans, edges_s)
    there = count > 1e-6
    return np.where(there, total / np.where(there, count, 1.0), np.nan)


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


def timelines(runs: Sequence[tuple[str, SimulationResult]], end_s: float) -> list[tuple[str, Timeline]]:
    """The timelines of all runs on one grid, so that they can be compared."""
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
    """Logarithms of the axis ends, at least one doubling apart, so that rounding errors stay invisible."""
    scales = np.concatenate([[1.0, 2.0], *(line.batch_scale for _, line in lines)])
    return [float(np.log10(np.nanmin(scales) / 1.1)), float(np.log10(np.nanmax(scales) * 1.1))]


def _numbers(values: Floats) -> list[float | None]:
    """Values for plotting, with four digits; NaN becomes a gap."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]
