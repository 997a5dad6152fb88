"""The HTML page of simulated studies: the best value over time, and which trial held which GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import stretto
from stretto.core.job import Job
from stretto.core.units import format_duration
from stretto.journal.folds.history import History
from stretto.report.figures.gantt import Groups, gpus_over_time
from stretto.report.page import Page, facts_html, table_html, write_page
from stretto.report.plotting import Palette, graph_objects, ramp, safe, styled, time_unit
from stretto.report.tables import HEADING, policy_row
from stretto.search.study import Study
from stretto.simulation.studies import StudyRun, fixed_cluster

MOMENTS = 240
"""Points of a line over time."""
MOST_LINES = 80
"""Learning curves in one figure: more would hide each other."""


def write_study_page(path: Path | str, runs: Sequence[StudyRun]) -> None:
    """Write one HTML file that needs no network."""
    write_page(path, study_html(runs))


def study_html(runs: Sequence[StudyRun]) -> str:
    """The page as text."""
    study = runs[0].file.tuning.study
    by_policy: dict[str, list[StudyRun]] = {}
    for run in runs:
        by_policy.setdefault(run.result.policy, []).append(run)
    end_s = max(run.result.finished_s for run in runs)
    page = Page(
        title=f"{study.name}: {', '.join(by_policy)}",
        lead=f"A simulation by Stretto {stretto.__version__}: simulated, not measured.",
    )
    page.heading(2, "Summary")
    rows = [policy_row(study, name, [run.result for run in group]) for name, group in by_policy.items()]
    page.html(table_html(HEADING, rows))
    page.heading(2, f"Best {study.metric} over time")
    page.text("The best value any trial has shown so far, as a mean over the simulations of each policy.")
    page.figure(best_over_time(by_policy, study, end_s), f"best {study.metric} over time by policy")
    page.heading(2, "One simulation of each policy")
    page.text(
        "Left to right is time. In the upper picture each line is a trial's learning curve, darker the "
        "further it came; in the lower each row is a GPU and each rectangle a trial on it."
    )
    for name, group in by_policy.items():
        page.heading(3, f"{name}, seed {group[0].result.seed}")
        page.figure(curves_figure(group[0], study, end_s), f"learning curves of trials under {name}")
        groups = by_rung(group[0].history, study)
        figure = gpus_over_time(group[0].history, _nodes(group[0]), groups, end_s)
        page.figure(figure, f"GPUs held by trials over time under {name}")
    page.heading(2, "About these numbers")
    page.html(facts_html(_facts(runs)))
    return page.render()


def best_over_time(by_policy: dict[str, list[StudyRun]], study: Study, end_s: float) -> Any:
    """The mean best value so far; a policy's line begins when all its simulations have a value."""
    go, unit = graph_objects(), time_unit(end_s)
    figure = go.Figure()
    palette = Palette.of(by_policy, ())
    moments = np.linspace(0.0, end_s, MOMENTS)
    several = len(by_policy) > 1
    for name, runs in by_policy.items():
        best = np.mean([_best_at(run.history, study, moments) for run in runs], axis=0)
        style = palette.policy(name)
        figure.add_scatter(
            x=moments / unit.seconds,
            y=[float(value) if np.isfinite(value) else None for value in best],
            name=safe(name),
            mode="lines",
            line={
                "color": style.colour,
                "dash": style.dash if several else "solid",
                "width": 2.2,
                "shape": "hv",
            },
        )
    figure.update_xaxes(**unit.axis(end_s))
    figure.update_yaxes(title_text=safe(f"best {study.metric} so far"))
    return styled(figure, 400)


def _best_at(history: History, study: Study, moments: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The best value up to each moment; not finite before the first value."""
    shown = sorted(
        (t_s, study.score(value))
        for job in history.jobs.values()
        if not job.diverged
        for t_s, value in job.result_times()
        if value is not None
    )
    times = np.array([t_s for t_s, _ in shown])
    best = np.maximum.accumulate(np.array([-np.inf, *(score for _, score in shown)]))
    sign = study.value_of(1.0)
    found: npt.NDArray[np.float64] = best[np.searchsorted(times, moments, side="right")] * sign
    return found


def curves_figure(run: StudyRun, study: Study, end_s: float) -> Any:
    """Learning curves of trials over time; of many, those with the most epochs."""
    go, unit = graph_objects(), time_unit(end_s)
    figure = go.Figure()
    trials = sorted(run.history.jobs.values(), key=lambda job: len(job.results))[-MOST_LINES:]
    colours = ramp(len(study.rungs) + 1)
    for job in trials:
        points = [(t_s, value) for t_s, value in job.result_times() if value is not None]
        figure.add_scatter(
            x=[t_s / unit.seconds for t_s, _ in points],
            y=[value for _, value in points],
            mode="lines+markers",
            marker={"size": 3},
            line={"color": colours[_rungs_passed(study, len(job.results))], "width": 1.2},
            name=safe(job.job.id),
            hovertemplate=f"{safe(job.job.id)}: %{{y:.4g}}<extra>{_config_text(job.job)}</extra>",
            showlegend=False,
        )
    figure.update_xaxes(**unit.axis(end_s))
    figure.update_yaxes(title_text=safe(study.metric))
    return styled(figure, 320, hovermode="closest")


def by_rung(history: History, study: Study) -> Groups:
    """Group trials by the last comparison they survived."""
    marks = [f"to epoch {rung}" for rung in study.rungs] + ["past the last comparison"]
    colours = dict(zip(marks, ramp(len(marks)), strict=True))
    group = {job_id: marks[_rungs_passed(study, len(job.results))] for job_id, job in history.jobs.items()}
    return Groups(marks, lambda job: group[job.id], lambda name, _: colours[name])


def _rungs_passed(study: Study, epochs: int) -> int:
    return sum(epochs > rung for rung in study.rungs)


def _config_text(job: Job) -> str:
    return "<br>".join(
        safe(f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}")
        for name, value in job.config
    )


def _nodes(run: StudyRun) -> tuple[Any, ...]:
    held = {node for job in run.history.jobs.values() for hold in job.holds for node in hold.allocation.nodes}
    fixed = fixed_cluster(run.file)
    return fixed if held <= {node.id for node in fixed} else ()


def _facts(runs: Sequence[StudyRun]) -> list[tuple[str, str]]:
    tuning, world = runs[0].file.tuning, runs[0].file.world
    deadline_s = tuning.limits.deadline_s
    return [
        ("curves", world.curves),
        ("deadline", "none" if deadline_s is None else format_duration(deadline_s)),
        ("simulations", f"{len({run.result.seed for run in runs})} seeds for each policy"),
        ("epoch", f"{world.profile.latency.epoch_s:g} s on one GPU, {world.profile.start_s:g} s for a start"),
        ("cost", ", ".join(f"{one.name} at ${one.usd_per_hour:g} an hour" for one in tuning.instances)),
    ]
