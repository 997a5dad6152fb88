"""The page of a real run: what it came to, and who held which slots when."""

from __future__ import annotations

from pathlib import Path

import stretto
from stretto.app.history import History, history_of
from stretto.app.real_result import TuneResult, ending_of, run_outline, run_tuning, tune_result
from stretto.app.run_folder import RunFolder, RunSpec
from stretto.app.run_jobs import run_result
from stretto.app.study_file import StudyFile, WorldSpec
from stretto.app.study_run import StudyResult, StudyRun
from stretto.core.cluster import Node
from stretto.core.events import RunStarted
from stretto.core.units import format_duration
from stretto.planning.tuning import Tuning
from stretto.report.figures_gantt import by_application, gpus_over_time
from stretto.report.page import Page, facts_html, table_html, write_page
from stretto.report.palette import Palette
from stretto.report.plotting import graph_objects
from stretto.report.run_jobs_text import JOB_HEADING, job_row
from stretto.report.run_text import config_text, past_text, ranked, trial_heading, trial_row
from stretto.report.study_page import best_over_time, by_rung, curves_figure

PLACES = {"ray": "a Ray cluster"}


def write_run_page(path: Path | str, folder: RunFolder) -> None:
    """Write one HTML file that needs no network."""
    graph_objects()
    spec = folder.begun_spec()
    write_page(path, _tune_html(folder, spec) if spec.is_study else _jobs_html(folder))


def _tune_html(folder: RunFolder, spec: RunSpec) -> str:
    tuning = run_tuning(folder, run_outline(folder, spec), spec)
    study = tuning.study
    result = tune_result(folder, ending_of(folder))
    history = history_of(folder.events())
    end_s = max(result.finished_s, 1.0)
    page = Page(title=f"{study.name}: {result.policy}", lead=_lead(spec))
    page.heading(2, "Summary")
    page.html(facts_html(_facts(result, tuning)))
    page.html(table_html(trial_heading(study), [trial_row(trial) for trial in ranked(result, study)]))
    if any(job.results for job in history.jobs.values()):
        run = _as_study_run(folder, spec, result, history)
        page.heading(2, f"Best {study.metric} over time")
        page.figure(best_over_time({result.policy: [run]}, study, end_s), f"best {study.metric} over time")
        page.heading(2, "Trials")
        page.text("Each line is a trial's learning curve, darker the further it came.")
        page.figure(curves_figure(run, study, end_s), "learning curves of trials")
    page.heading(2, "Slots")
    page.text("Left to right is time; each row is a slot and each rectangle a trial on it.")
    figure = gpus_over_time(history, _nodes(folder), by_rung(history, study), end_s)
    page.figure(figure, "slots held by trials over time")
    return page.render()


def _jobs_html(folder: RunFolder) -> str:
    result = run_result(folder, ending_of(folder))
    history = history_of(folder.events())
    palette = Palette.of([result.policy], {job.job.application for job in history.jobs.values()})
    page = Page(title=f"{folder.name}: {result.policy}", lead=_lead(folder.begun_spec()))
    page.heading(2, "Summary")
    page.html(table_html(JOB_HEADING, [job_row(job) for job in result.jobs]))
    page.heading(2, "Slots")
    page.text("Left to right is time; each row is a slot and each rectangle a job on it.")
    end_s = max(result.finished_s, 1.0)
    figure = gpus_over_time(history, _nodes(folder), by_application(history, palette), end_s)
    page.figure(figure, "slots held by jobs over time")
    return page.render()


def _lead(spec: RunSpec) -> str:
    place = PLACES.get(str(spec.asked.get("on")), "one machine")
    return f"A real run on {place} by Stretto {stretto.__version__}: measured, not simulated."


def _nodes(folder: RunFolder) -> tuple[Node, ...]:
    """Nodes that were there from the start; rented ones are read off what was held."""
    first = next(folder.events(), None)
    return first.nodes if isinstance(first, RunStarted) else ()


def _facts(result: TuneResult, tuning: Tuning) -> list[tuple[str, str]]:
    deadline_s = tuning.limits.deadline_s
    best = "none" if result.best_metric is None else f"{result.best_metric:.6g} ({result.best_trial})"
    return [
        (f"best {result.metric}", best),
        ("configuration", config_text(result.best_config or {})),
        ("checkpoint", str(result.checkpoint or "none")),
        ("ended by", result.ended_by),
        ("finish", format_duration(result.finished_s)),
        ("deadline", "none" if deadline_s is None else format_duration(deadline_s)),
        *([("limits", past_text(result))] if result.past_limits else []),
        ("cost", f"${result.cost_usd:.2f}"),
        ("slots", str(tuning.max_nodes)),
    ]


def _as_study_run(folder: RunFolder, spec: RunSpec, result: TuneResult, history: History) -> StudyRun:
    """The run in the form that pictures of simulated studies take."""
    outline = run_outline(folder, spec)
    tuning = run_tuning(folder, outline, spec)
    file = StudyFile(
        tuning=tuning,
        space=outline.space,
        sampler=outline.sampler,
        fixed_nodes=tuning.max_nodes,
        world=WorldSpec(curves=folder.name, profile=tuning.profile),
        path=outline.path,
    )
    row = StudyResult(
        policy=result.policy,
        deadline_s=tuning.limits.deadline_s,
        seed=spec.seed,
        best_metric=result.best_metric,
        trials_started=sum(job.starts > 0 for job in history.jobs.values()),
        gpu_hours=result.gpu_hours,
        cost_usd=result.cost_usd,
        finished_s=result.finished_s,
        ended_by="trials",
    )
    return StudyRun(row, history, file)
