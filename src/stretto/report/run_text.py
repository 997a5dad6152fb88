"""Real runs in words: the expectation before a start, and the summary at the end."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.core.errors import with_log
from stretto.core.job import Value
from stretto.core.units import counted, format_duration, format_usd
from stretto.journal.folds.history import Gap
from stretto.launch.expect import Expectation
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Tuning
from stretto.report.plan_text import answer_lines, is_priced, plan_text, stage_table
from stretto.report.text import markdown_table, one_line
from stretto.runs.deadline import EndedBy
from stretto.runs.explain import time_text
from stretto.runs.folder import RUNS, PastLimits
from stretto.runs.job_results import JobResult, RunResult
from stretto.runs.live_state import NOT_STARTED, JobPhase
from stretto.runs.metrics_files import metrics_text
from stretto.runs.results import TrialResult, TuneResult
from stretto.search.study import Study
from stretto.simulation.replay import Replayed
from stretto.worlds.replay import ValueSource

SLOTS = "slots"
"""What trials of a real run get: GPUs or cores."""
MOST_SHOWN = 3
"""Different errors that are printed in full."""
MOST_NAMED = 5
"""Jobs that are named for one error."""
MOST_NAMES = 8
"""Files of a command that are named."""
MOST_ROWS = 10
"""Trials in the table of a summary: the best."""
BATCH = "batch"


def with_failed(ending: str, failed: int) -> str:
    """How a run ended, with the number of failed jobs; the time follows."""
    return f"{ending}, {failed} failed," if failed else ending


def as_far_as_known(ending: str, until_s: float) -> str:
    """How a run with a damaged journal ended; its time is unknown."""
    return (
        f"{ending.rstrip(',')}; its journal is damaged, and what follows is known only until "
        f"{format_duration(until_s)}."
    )


def failure_lines(failed: Iterable[TrialResult | JobResult]) -> Iterator[str]:
    """The errors of failed jobs; an error that several jobs share is shown once."""
    alike: dict[str, list[TrialResult | JobResult]] = {}
    for one in failed:
        alike.setdefault(one.error.strip(), []).append(one)
    groups = list(alike.items())
    for error, (first, *others) in groups[:MOST_SHOWN]:
        yield ""
        yield with_log(f"{one_line(first.id)} failed: {error}", str(first.log))
        if others:
            yield f"The same in {_named([one.id for one in others])}."
    if rest := [one.id for _, group in groups[MOST_SHOWN:] for one in group]:
        yield ""
        yield f"Other errors: {_named(rest)}."


def _named(jobs: list[str]) -> str:
    shown = ", ".join(one_line(job) for job in jobs[:MOST_NAMED])
    return shown if len(jobs) <= MOST_NAMED else f"{shown} and {len(jobs) - MOST_NAMED} more"


_ENDINGS = {
    "deadline": "the deadline came",
    "budget": "the budget was spent",
    "stalled": "the policy started nothing more",
    "request": "it was asked to stop",
    "unfinished": "it is not over",
    "stopped": "it was stopped, and can be resumed,",
    "interrupted": "it was interrupted, and can be resumed,",
}
"""How a run ended, except for a run whose jobs all ended."""


def _ending(ended_by: str, what: str, failed: int) -> str:
    """The sentence on how a run of trials or jobs (`what`) ended."""
    if ended_by == EndedBy.JOBS:
        return with_failed(f"every {what} ended", failed)
    return _ENDINGS.get(ended_by, ended_by)


def expectation_text(tuning: Tuning, policy: str, expectation: Expectation) -> str:
    """The plan, for a policy that makes one; for others the limits and the expected speed."""
    planned, expected = expectation.planned, _expected(expectation)
    if planned is not None and is_priced(tuning):
        return plan_text(tuning, planned.outcome, SLOTS, expected=expected)
    if planned is not None:  # without a price there is no trade-off to show
        plan = planned.outcome.followed(tuning.limits).plan
        answer = "\n".join(answer_lines(tuning, planned.outcome))
        return f"{answer}\n{expected}\n\n{stage_table(plan, SLOTS)}\n"
    study, limits = tuning.study, tuning.limits
    until = (
        "without a deadline" if limits.deadline_s is None else f"until {format_duration(limits.deadline_s)}"
    )
    lines = [
        (
            f"{study.name}: at most {study.trials} trials of up to {study.max_epochs} epochs under {policy}, "
            f"on {counted(tuning.max_nodes, 'slot')}, {until}."
        ),
        (
            f"An epoch is believed to take {_seconds(tuning.profile.latency.epoch_s)} on one slot, "
            f"a start {_seconds(tuning.profile.start_s)}."
        ),
        *([expected] if expected else []),
    ]
    return "\n".join(lines) + "\n"


def _expected(expectation: Expectation) -> str:
    """The expected finish, epochs and cost of the run, start-up included; the summary compares with them."""
    finish_s, epochs = expectation.finish_s, expectation.epochs
    if finish_s is None or epochs is None:
        return ""
    loading = ""
    if expectation.loading_s >= 1.0:
        loading = f", with {format_duration(expectation.loading_s)} to load the training code"
    return (
        f"Expected of the run{loading}: done after {_between(finish_s, format_duration)}; "
        f"epochs in all: {_between(epochs, _count)}{_cost(expectation.cost_usd)}."
        f"{_kept(expectation.kept_usd)}"
    )


def _kept(usd: float) -> str:
    return f" {format_usd(usd)} of the budget is kept for stopping." if usd >= 0.005 else ""


def tune_text(result: TuneResult, study: Study, other: Replayed | None = None) -> str:
    """The summary of a study, with the result of another policy in a replay."""
    return "\n".join(_summary(result, study, other)) + "\n"


def replayed_json(other: Replayed) -> dict[str, Any]:
    """The result of another policy in a replay, as a JSON-serialisable dict."""
    found = other.result
    return {
        "policy": found.policy,
        "best_metric": found.best_metric,
        "extrapolated_best": None if other.extrapolated is None else dataclasses.asdict(other.extrapolated),
        "finished_s": found.finished_s,
        "cost_usd": found.cost_usd,
        "shares": {str(origin): share for origin, share in other.shares.items()},
    }


def _summary(result: TuneResult, study: Study, other: Replayed | None) -> Iterator[str]:
    ending = _ending(result.ended_by, "trial", result.trials_by_state.get(JobPhase.FAILED, 0))
    name = one_line(run_name(result, study))
    late = f"; what ran took {format_duration(result.overrun_s)} more to end" if result.overrun_s else ""
    after = f"{format_duration(result.finished_s - result.overrun_s)}{_measured(result)}{late}"
    if result.known_until_s is None:
        yield f"{name} under {result.policy}: {ending} after {after}."
    else:
        yield f"{name} under {result.policy}: {as_far_as_known(ending, result.known_until_s)}"
    if result.best_metric is None:
        yield f"There is no best trial: {result.problem}"
    else:
        failed = any(trial.id == result.best_trial and trial.error for trial in result.trials)
        which = f"{result.best_trial}, which failed later" if failed else result.best_trial
        yield f"best {study.metric}   {result.best_metric:.6g} ({which})"
        yield f"configuration   {config_text(result.best_config or {})}"
        yield f"checkpoint      {checkpoint_text(result)}"
    yield from map(one_line, result.damaged)
    facts = study_figures(result)
    if other is not None:
        facts.append(("compared with", compared_text(other)))
    for what, text in facts:
        yield f"{what:<15} {text}"
    yield ""
    yield trial_table(result, study)
    if (left_out := len(ranked(result, study)) - MOST_ROWS) > 0:
        yield f"and {left_out} more: `stretto explain {_as_argument(result.run)}`"
    yield from failure_lines(trial for trial in result.trials if trial.error)


def checkpoint_text(result: TuneResult) -> str:
    """Where the best model is; for a command, where its own files are."""
    if result.checkpoint is None and result.files is not None:
        names = ": " * bool(result.file_names) + ", ".join(result.file_names[:MOST_NAMES])
        more = f" and {len(result.file_names) - MOST_NAMES} more" * (len(result.file_names) > MOST_NAMES)
        return f"what its command saved is in {result.files}{names}{more}"
    return str(result.checkpoint or "none was kept")


def _as_argument(run: Path) -> str:
    """How `stretto` commands name the run."""
    return shlex.quote(run.name if run.parent == RUNS else str(run))


def run_name(result: TuneResult, study: Study) -> str:
    """The run's name, with the study's if they differ."""
    return result.run.name if result.run.name == study.name else f"{result.run.name}, of {study.name},"


def study_figures(result: TuneResult) -> list[tuple[str, str]]:
    """The figures of a study, each with the expected value."""
    if result.known_until_s is not None:
        return _figures_until_damage(result, result.known_until_s)
    so_far = "" if result.is_over else " so far"
    against = _at_deadline(result) if result.is_cut_as_foreseen else _predicted(result.predicted_finish_s)
    facts = [
        ("trials", trials_text(result)),
        ("epochs", f"{result.epochs}{so_far}{_predicted(result.predicted_epochs, _count)}"),
        ("slot hours", f"{result.gpu_hours:.3f}"),
        ("finish", f"{format_duration(result.finished_s)}{so_far}{against}"),
        ("deadline", deadline_text(result)),
    ]
    expected = result.predicted_cost_usd
    if result.cost_usd or (expected and expected.mean):
        facts.append(("cost", f"{format_usd(result.cost_usd)}{_predicted(expected, format_usd)}"))
    if result.gaps:
        facts.append(("no controller", gaps_text(result.gaps)))
    if result.past_limits:
        facts.append(("limits", raised_limits_text(result)))
    return facts


def _figures_until_damage(result: TuneResult, until_s: float) -> list[tuple[str, str]]:
    """The figures of a run whose journal is damaged, up to the damage and without expected values."""
    until = f" (until {format_duration(until_s)})"
    return [
        ("trials", f"{trials_text(result)}{until}"),
        ("epochs", f"{result.epochs}{until}"),
        ("slot hours", f"{result.gpu_hours:.3f}{until}"),
        ("finish", unknown_finish(until_s)),
        ("deadline", deadline_text(result)),
        *([("cost", f"{format_usd(result.cost_usd)}{until}")] if result.cost_usd else []),
    ]


def unknown_finish(until_s: float) -> str:
    """The finish of a run whose journal is damaged."""
    return f"not known: the journal is damaged after {format_duration(until_s)}"


def _at_deadline(result: TuneResult) -> str:
    late = f", and {format_duration(result.overrun_s)} until what ran had ended" if result.overrun_s else ""
    return f" (the deadline{late})"


def deadline_text(result: TuneResult) -> str:
    """The deadline as given, and how much of it passed before the run began."""
    deadline = result.deadline
    if deadline is None:
        return "none"
    if deadline.time_of_day:
        return f"{deadline.time_of_day}, {format_duration(deadline.after_s)} after the first start"
    given = format_duration(deadline.given_s)
    if not deadline.is_cut:
        return given
    return f"{given}; measuring and planning took {format_duration(deadline.measuring_s)} of it"


def _measured(result: TuneResult) -> str:
    deadline = result.deadline
    if result.ended_by != "deadline" or deadline is None or not deadline.is_cut:
        return ""
    return f", and {format_duration(deadline.measuring_s)} of measuring and planning"


def trials_text(result: TuneResult) -> str:
    """The number of trials in each state; those that never ran come last."""
    counts = sorted(result.trials_by_state.items(), key=lambda item: (item[0] == NOT_STARTED, item[0]))
    return ", ".join(f"{count} {state}" for state, count in counts) or "none"


def gaps_text(gaps: Iterable[Gap]) -> str:
    """The periods without a running controller, and why."""
    return "; ".join(
        f"{time_text(gap.start_s)} to {time_text(gap.end_s)}, after {_how_it_ended(gap)}" for gap in gaps
    )


def _how_it_ended(gap: Gap) -> str:
    if gap.at_deadline:
        return "a deadline that was moved later on"
    return "it was stopped" if gap.stopped else "it was interrupted"


def raised_limits_text(result: TuneResult) -> str:
    """Limits that were raised during the run, and when."""
    before_s = 0.0 if result.deadline is None else result.deadline.measuring_s
    return "; ".join(
        f"raised after {format_duration(one.until_s)}, {_old_limits(one, before_s)}"
        for one in result.past_limits
    )


def _old_limits(limits: PastLimits, before_s: float) -> str:
    """The limits as the user gave them: the deadline includes the time before the run began."""
    deadline_s, budget_usd = limits.deadline_s, limits.budget_usd
    time = "no deadline" if deadline_s is None else f"a deadline of {format_duration(deadline_s + before_s)}"
    return f"from {time}" + ("" if budget_usd is None else f" and ${budget_usd:g}")


def trial_table(result: TuneResult, study: Study) -> str:
    """The best trials."""
    best = ranked(result, study)[:MOST_ROWS]
    return markdown_table(trial_heading(study), [trial_row(trial) for trial in best])


def ranked(result: TuneResult, study: Study) -> list[TrialResult]:
    """Trials that finished an epoch or failed, the best first; ties by submission."""
    return sorted(
        (trial for trial in result.trials if trial.epochs or trial.state == "failed"),
        key=lambda trial: -study.score(trial.best_metric),
    )


def trial_heading(study: Study) -> list[str]:
    """The column titles for `trial_row`."""
    return ["trial", f"best {study.metric}", "epochs", "state", "retries", "configuration"]


def trial_row(trial: TrialResult) -> list[str]:
    """The table row of a trial."""
    best = "-" if trial.best_metric is None else f"{trial.best_metric:.6g}"
    return [trial.id, best, str(trial.epochs), trial.state, str(trial.retries), config_text(trial.config)]


def config_text(config: dict[str, Value]) -> str:
    """Hyperparameters in one line."""
    return one_line(
        ", ".join(
            f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
            for name, value in config.items()
        )
    )


def compared_text(other: Replayed) -> str:
    """The best recorded value another policy would have found; an extrapolated one is marked as such."""
    found, extrapolated = other.result, other.extrapolated
    best = "no recorded value" if found.best_metric is None else f"{found.best_metric:.6g}"
    if extrapolated is not None:
        best += f", or {extrapolated.text},"
    unseen = 1.0 - other.shares[ValueSource.RECORDED]
    doubt = f"; {unseen:.0%} of its epochs were not recorded" if unseen else ""
    return f"{found.policy} (replay{doubt}): {best} in {format_duration(found.finished_s)}"


def _predicted(estimate: Estimate | None, shown: Callable[[float], str] = format_duration) -> str:
    return "" if estimate is None else f" (expected {_between(estimate, shown)})"


def _count(number: float) -> str:
    return f"{number:.0f}"


def _cost(estimate: Estimate | None) -> str:
    return "" if estimate is None or not estimate.mean else f"; cost: {_between(estimate, format_usd)}"


def _between(estimate: Estimate, shown: Callable[[float], str]) -> str:
    mean, low, high = (shown(value) for value in (estimate.mean, estimate.p10, estimate.p90))
    return mean if low == mean == high else f"{mean}, {low} to {high}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


_COLUMNS: tuple[tuple[str, Callable[[JobResult], str]], ...] = (
    ("job", lambda job: one_line(job.id)),
    ("state", lambda job: job.state),
    ("epochs", lambda job: str(job.epochs)),
    ("last report", lambda job: one_line(metrics_text(job.metrics)) or "-"),
    ("completion", lambda job: "-" if job.jct_s is None else format_duration(job.jct_s)),
    (BATCH, lambda job: str(job.batch or "-")),
    ("restarts", lambda job: str(job.restarts)),
    ("retries", lambda job: str(job.retries)),
    ("slot hours", lambda job: f"{job.gpu_hours:.3f}"),
    ("checkpoint", lambda job: str(job.checkpoint or job.files or "-")),
)


def jobs_text(result: RunResult) -> str:
    """The summary of a run of jobs."""
    return "\n".join(_jobs_summary(result)) + "\n"


def _jobs_summary(result: RunResult) -> Iterator[str]:
    ending = _ending(result.ended_by, "job", sum(job.state == JobPhase.FAILED for job in result.jobs))
    how = f"{ending} after {format_duration(result.finished_s)}."
    if result.known_until_s is not None:
        how = as_far_as_known(ending, result.known_until_s)
    yield f"{result.run.name} under {result.policy}: {how}"
    mean = "" if result.mean_jct_s is None else f", mean completion time {format_duration(result.mean_jct_s)}"
    cost = f", {format_usd(result.cost_usd)}" if result.cost_usd else ""
    yield f"{result.gpu_hours:.3f} slot hours{mean}{cost}"
    yield from map(one_line, result.damaged)
    yield ""
    yield markdown_table(*job_table(result.jobs))
    yield from failure_lines(job for job in result.jobs if job.error)


def job_table(jobs: Sequence[JobResult]) -> tuple[list[str], list[list[str]]]:
    """The heading and rows of a table of jobs; batch sizes only if one is adaptive."""
    adapts = any(job.batch is not None for job in jobs)
    columns = [(name, cell) for name, cell in _COLUMNS if adapts or name != BATCH]
    return [name for name, _ in columns], [[cell(job) for _, cell in columns] for job in jobs]
