"""Runs of jobs, and the stories of runs, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stretto.app.explain import JobSummary, Line, Story, time_text
from stretto.app.real_board import Phase
from stretto.app.real_drive import EndedBy
from stretto.app.real_shown import metrics_text
from stretto.app.run_jobs import JobResult, RunResult
from stretto.core.units import format_duration, format_usd
from stretto.report.failures import as_far_as_known, failure_lines, with_failed
from stretto.report.names import one_line
from stretto.report.text_table import markdown_table

BATCH = "batch"
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

_ENDINGS = {
    "jobs": "every job came to its end",
    "stalled": "the policy started nothing more",
    "request": "it was asked to stop",
    "unfinished": "it is not over",
    "stopped": "it was stopped, and can be resumed,",
    "interrupted": "it was interrupted, and can be resumed,",
}


def jobs_text(result: RunResult) -> str:
    """The summary of a run of jobs."""
    return "\n".join(_summary(result)) + "\n"


def _summary(result: RunResult) -> Iterator[str]:
    ending = _ENDINGS.get(result.ended_by, result.ended_by)
    if result.ended_by == EndedBy.JOBS:
        ending = with_failed(ending, sum(job.state == Phase.FAILED for job in result.jobs))
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
    yield from failure_lines((job.id, job.error) for job in result.jobs if job.error)


def job_table(jobs: Sequence[JobResult]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows; with a column of batches where any is adapted."""
    adapts = any(job.batch is not None for job in jobs)
    columns = [(name, cell) for name, cell in _COLUMNS if adapts or name != BATCH]
    return [name for name, _ in columns], [[cell(job) for _, cell in columns] for job in jobs]


def story_text(story: Story) -> str:
    """What happened, in time order; of a whole run also a line for each job."""
    lines = [_line(line, story) for line in story.lines]
    if story.job is not None:
        return "\n".join(lines) + "\n"
    shown = "best" if story.is_study else "last report"
    heading = ["job", "state", "epochs", "restarts", "retries", shown, "last reason"]
    rows = [
        [
            one_line(job.id),
            job.state,
            str(job.epochs),
            str(job.restarts),
            str(job.retries),
            _shown(job),
            one_line(job.last_reason),
        ]
        for job in story.jobs
    ]
    return "\n".join([*lines, "", markdown_table(heading, rows)]) + "\n"


def _shown(job: JobSummary) -> str:
    if job.value is not None:
        return f"{job.value:.6g}"
    return one_line(metrics_text(job.metrics)) or "-"


def _line(line: Line, story: Story) -> str:
    about = line.what if story.job is not None else f"{line.subject} {line.what}"
    return f"{time_text(line.t_s):>8}  {one_line(about)}{_why(line.text)}"


def _why(text: str) -> str:
    """A traceback keeps its lines, set off from the others."""
    if "\n" not in text:
        return f": {one_line(text)}" if text else ""
    return ":\n" + "\n".join(f"            {one_line(line)}" for line in text.splitlines())
