"""`stretto explain`: why a run did what it did."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from stretto.cli.flags import AsJson
from stretto.report.text import markdown_table, one_line
from stretto.runs.deadline import EndedBy
from stretto.runs.explain import JobSummary, Story, StoryLine, time_text
from stretto.runs.explain import explain as explain_run
from stretto.runs.folder import RunFolder, find_run
from stretto.runs.live_state import JobPhase
from stretto.runs.metrics_files import metrics_text
from stretto.runs.status import RunStatus, ending_of, shown_state, status_of

ENDS = {
    EndedBy.JOBS: "all jobs are done",
    EndedBy.DEADLINE: "the deadline came",
    EndedBy.BUDGET: "the budget was spent",
}


def explain(
    run: Annotated[str, typer.Argument(help="A run under ./runs, or its folder.")],
    job: Annotated[str | None, typer.Argument(help="A job or trial of it.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a run: which job got what, when and why, in time order.

    Every start, pause, resume, resize, change of batch and stop is listed; for one job also waiting,
    epochs, retries, notes and checkpoints. Restarts are starts and resizes after the first start, retries
    are restarts after a failure.

    Example: [bold]stretto explain resnet-cifar trial-003[/bold]
    """
    folder = find_run(run)
    damage = folder.damage()
    if damage:
        print(damage, file=sys.stderr)
    story = _as_it_stands(explain_run(folder, job), folder, damaged=bool(damage))
    if as_json:
        plain = story.as_dict() | ({"damage": damage} if damage else {})
        print(json.dumps(plain, indent=2, allow_nan=False))
    else:
        print(story_text(story), end="")


def _as_it_stands(story: Story, folder: RunFolder, *, damaged: bool) -> Story:
    """Add the end of the run, and the states of jobs that ran then."""
    last, last_s = None, 0.0
    for last in folder.events():
        last_s = max(last_s, last.t_s)
    ending = ending_of(folder)
    status = ending or status_of(folder, last)
    jobs = tuple(
        dataclasses.replace(job, state=shown_state(JobPhase(job.state), status)) for job in story.jobs
    )
    lines = story.lines
    if damaged:
        ended = f" The run is over: {ENDS[ending]}." if ending in ENDS else ""
        text = f"its journal is damaged, and what follows is not known.{ended}"
        lines += (StoryLine(last_s, "run", "known until here", text),)
    elif status is RunStatus.INTERRUPTED and last is not None:
        lines += (StoryLine(last_s, "run", "interrupted", "what follows is not known"),)
    elif ending in ENDS and (story.job is None or lines[-1].places):
        due_s = folder.begun_spec().deadline_s if ending is EndedBy.DEADLINE else None
        what = "ended" if story.job is None else "run ended"
        failed = sum(job.state == JobPhase.FAILED for job in jobs) if ending is EndedBy.JOBS else 0
        text = f"{ENDS[ending]}, {failed} failed" if failed else ENDS[ending]
        lines += (StoryLine(max(last_s, due_s or 0.0), "run", what, text),)
    return dataclasses.replace(story, jobs=jobs, lines=lines)


def story_text(story: Story) -> str:
    """What happened, in time order; for a whole run also a line per job."""
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


def _line(line: StoryLine, story: Story) -> str:
    about = line.what if story.job is not None else f"{line.subject} {line.what}"
    return f"{time_text(line.t_s):>8}  {one_line(about)}{_why(line.text)}"


def _why(text: str) -> str:
    """The text of a line; a traceback stands on lines of its own."""
    if "\n" not in text:
        return f": {one_line(text)}" if text else ""
    return ":\n" + "\n".join(f"            {one_line(line)}" for line in text.splitlines())
