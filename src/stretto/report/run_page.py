"""The HTML page of a real run: its result, its learning curves, and which job held which slots when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import stretto
from stretto.core.units import format_duration, format_usd
from stretto.inputs.study import StudyFile
from stretto.journal.folds.history import History, history_of
from stretto.report.figures.gantt import by_application, gpus_over_time, with_expected, with_gaps
from stretto.report.page import Page, facts_html, table_html, write_page
from stretto.report.plotting import Palette, graph_objects, time_unit
from stretto.report.run_text import (
    checkpoint_text,
    config_text,
    gaps_text,
    job_table,
    ranked,
    study_figures,
    trial_heading,
    trial_row,
    unknown_finish,
)
from stretto.report.study_page import best_over_time, by_rung, curves_figure
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.job_results import RunResult, run_result
from stretto.runs.results import TuneResult, tune_result
from stretto.runs.status import ending_of
from stretto.simulation.replay import study_of_run
from stretto.simulation.studies import StudyResult, StudyRun

PLACES = {"ray": "a Ray cluster"}
SLOTS_TEXT = "Left to right is time; each row is a slot and each rectangle"


def write_run_page(path: Path | str, folder: RunFolder) -> None:
    """Write one HTML file that needs no network."""
    graph_objects()
    spec = folder.begun_spec()
    write_page(path, _tune_html(folder, spec) if spec.is_study else _jobs_html(folder))


def _tune_html(folder: RunFolder, spec: RunSpec) -> str:
    file = study_of_run(folder)
    study = file.tuning.study
    result = tune_result(folder, ending_of(folder))
    history = replace(history_of(folder.events()), gaps=result.gaps)
    end_s = _shown_until_s(result)
    unit = time_unit(end_s)

    def finished(figure: Any) -> Any:
        marked = with_gaps(figure, result.gaps, unit)
        expected = result.predicted_finish_s
        if expected is None or not result.is_over or result.is_cut_as_foreseen:
            return marked
        return with_expected(marked, expected.mean, unit)

    page = Page(title=f"{folder.name}: {result.policy}", lead=_lead(spec))
    page.heading(2, "Summary")
    if damage := folder.damage():
        page.text(damage)
    page.html(facts_html(_facts(result, study.name, spec)))
    page.html(table_html(trial_heading(study), [trial_row(trial) for trial in ranked(result, study)]))
    if any(job.results for job in history.jobs.values()):
        run = _as_study_run(file, spec.seed, result, history)
        page.heading(2, f"Best {study.metric} over time")
        best = best_over_time({result.policy: [run]}, study, end_s)
        page.figure(finished(best), f"best {study.metric} over time")
        page.heading(2, "Trials")
        page.text("Each line is a trial's learning curve; the more comparisons it survived, the darker.")
        page.figure(finished(curves_figure(run, study, end_s)), "learning curves of trials")
    page.heading(2, "Slots")
    page.text(f"{SLOTS_TEXT} a trial on it.{_nodes_text(history)}")
    figure = gpus_over_time(history, (), by_rung(history, study), end_s, slot="slot")
    page.figure(finished(figure), "slots held by trials over time")
    return page.render()


def _shown_until_s(result: TuneResult) -> float:
    """The end of the time axis: the end of the run, or its expected end if that is later."""
    expected = result.predicted_finish_s if result.is_over else None
    return max(result.finished_s, 1.0, 0.0 if expected is None else expected.mean)


def _jobs_html(folder: RunFolder) -> str:
    result = run_result(folder, ending_of(folder))
    history = history_of(folder.events())
    palette = Palette.of([result.policy], {job.job.application for job in history.jobs.values()})
    page = Page(title=f"{folder.name}: {result.policy}", lead=_lead(folder.begun_spec()))
    page.heading(2, "Summary")
    if damage := folder.damage():
        page.text(damage)
    page.html(facts_html(_job_facts(result, history)))
    page.html(table_html(*job_table(result.jobs)))
    page.heading(2, "Slots")
    page.text(f"{SLOTS_TEXT} a job on it.{_nodes_text(history)}")
    end_s = max(result.finished_s, 1.0)
    figure = gpus_over_time(history, (), by_application(history, palette), end_s, slot="slot")
    page.figure(with_gaps(figure, history.gaps, time_unit(end_s)), "slots held by jobs over time")
    return page.render()


def _nodes_text(history: History) -> str:
    """The sentence on nodes in the background, if nodes came and went."""
    came = any(stay.came for stay in history.nodes)
    return " In the background are nodes that start up or are idle." if came else ""


def _lead(spec: RunSpec) -> str:
    place = PLACES.get(str(spec.asked.get("on")), "one machine")
    return f"A real run on {place} by Stretto {stretto.__version__}: measured, not simulated."


def _facts(result: TuneResult, study: str, spec: RunSpec) -> list[tuple[str, str]]:
    best = "none" if result.best_metric is None else f"{result.best_metric:.6g} ({result.best_trial})"
    return [
        *([] if study == result.run.name else [("study", study)]),
        (f"best {result.metric}", best),
        ("configuration", config_text(result.best_config or {})),
        ("checkpoint", checkpoint_text(result)),
        *([("damaged", " ".join(result.damaged))] if result.damaged else []),
        ("ended by", "trials" if result.ended_by == EndedBy.JOBS else result.ended_by),
        *study_figures(result),
        ("slots", f"{spec.slots} at most"),
    ]


def _job_facts(result: RunResult, history: History) -> list[tuple[str, str]]:
    return [
        ("ended by", result.ended_by),
        (
            "finish",
            format_duration(result.finished_s)
            if result.known_until_s is None
            else unknown_finish(result.known_until_s),
        ),
        ("slot hours", f"{result.gpu_hours:.3f}"),
        *([("cost", format_usd(result.cost_usd))] if result.cost_usd else []),
        *([("no controller", gaps_text(history.gaps))] if history.gaps else []),
        *([("damaged", " ".join(result.damaged))] if result.damaged else []),
    ]


def _as_study_run(file: StudyFile, seed: int, result: TuneResult, history: History) -> StudyRun:
    """The run in the form that the figures of simulated studies take."""
    row = StudyResult(
        policy=result.policy,
        deadline_s=file.tuning.limits.deadline_s,
        seed=seed,
        best_metric=result.best_metric,
        trials_started=sum(job.starts > 0 for job in history.jobs.values()),
        gpu_hours=result.gpu_hours,
        cost_usd=result.cost_usd,
        finished_s=result.finished_s,
        ended_by="trials",
    )
    return StudyRun(row, history, file)
