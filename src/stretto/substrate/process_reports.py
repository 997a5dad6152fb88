"""What a command prints about itself: one JSON object per line of its standard output.

    {"work_done": 120, "epoch": 3, "step_s": 0.11, "sync_s": 0.02, "loss": 0.5, "grad_sqr": 1, "grad_var": 9}

    work_done   statistical units done so far (steps at the initial batch size)
    epoch       epochs completed
    step_s      mean time of one optimisation step since the last line, without accumulation passes
    sync_s      the part of it that waits for the exchange of gradients; needed with several workers
    loss        training loss of the epoch just completed; the first one of each epoch counts
    grad_sqr, grad_var   gradient statistics at the initial batch size, both or none

Every key may be left out. A line without any of them is not a report.

Of a trial, lines with the study's metric count, {"epoch": 3, "accuracy": 0.91} or {"accuracy": 0.91}: see
`process_trials`. The others only add measurements.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.events import JobReported
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample
from stretto.substrate.process_lines import LARGEST_GRADIENT, LONGEST_S, MOST_WORK, Line
from stretto.substrate.process_trials import Mark, Trial, read_result

KEYS = frozenset({"work_done", "epoch", "step_s", "sync_s", "loss", "grad_sqr", "grad_var"})
_START = Mark()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come, as last reported."""

    work_done: float = 0.0
    epoch: int = 0
    loss_epoch: int = 0
    """The last epoch whose loss is known."""
    result_epoch: int = 0
    """Of a trial: the last epoch whose result is known."""

    def after(self, report: JobReported) -> Progress:
        return Progress(
            report.work_done,
            report.epoch,
            max([self.loss_epoch, *(point.epoch for point in report.losses)]),
            max([self.result_epoch, *(result.epoch for result in report.results)]),
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command runs with: the configuration its measurements belong to."""

    job_id: str
    allocation: Allocation
    batch: BatchChoice
    trial: Trial | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Of which a report has at least one."""
        return KEYS if self.trial is None else KEYS | {self.trial.metric}


@dataclass(frozen=True, slots=True)
class Reading:
    """A line as understood: the report, if it is one, and what had to be left out of it."""

    report: JobReported | None = None
    problems: tuple[str, ...] = ()
    mark: Mark = _START
    """For the lines that follow in the same start."""
    wrong: str = ""
    """Of a trial: why the metric that the line has does not count, where people should know."""


def read_report(text: bytes, setup: Setup, last: Progress, *, t_s: float, mark: Mark = _START) -> Reading:
    """The report a line of output is, counting from the `last` one and, for a trial, from the `mark`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Reading(mark=mark)
    if not isinstance(values, dict) or setup.keys.isdisjoint(values):
        return Reading(mark=mark)
    line = Line(values)
    shown = None
    if setup.trial is not None:
        known = last.result_epoch
        shown = read_result(line, setup.trial, setup.allocation, known=known, mark=mark, t_s=t_s)
    result = shown.result if shown else None
    progress = _progress(line, last, mark) if shown is None else _progress_of_trial(result, last)
    report = JobReported(
        t_s=t_s,
        job_id=setup.job_id,
        work_done=progress.work_done,
        epoch=progress.epoch,
        speeds=_speeds(line, setup),
        noise=_noise(line),
        losses=_losses(line, progress),
        results=() if result is None else (result,),
    )
    if shown is None:
        if line.gives("epoch"):
            mark = replace(mark, epoch=max(mark.epoch, progress.epoch), t_s=t_s)
        return Reading(report, tuple(line.problems), mark, _wrong(line, ""))
    return Reading(report, tuple(line.problems), shown.mark, _wrong(line, shown.wrong))


def _wrong(line: Line, wrong: str) -> str:
    """What people should know of a line: why its metric does not count, or its epoch."""
    if wrong or not line.wrong:
        return wrong
    return f"it prints lines that do not count as they are: {line.wrong}; this is said once"


def _progress(line: Line, last: Progress, mark: Mark) -> Progress:
    """Within a start epochs do not go back; a start may begin anew."""
    work_done, epoch = (
        line.number("work_done", f"a number from 0 to {MOST_WORK:g}", most=MOST_WORK),
        line.epoch(),
    )
    if epoch is not None and mark.t_s is not None and epoch < mark.epoch:
        line.go_back(epoch, mark.epoch)
        epoch = None
    return replace(
        last,
        work_done=last.work_done if work_done is None else work_done,
        epoch=last.epoch if epoch is None else epoch,
    )


def _progress_of_trial(result: Result | None, last: Progress) -> Progress:
    """A trial's work is counted in epochs, and only their results are progress."""
    return last if result is None else replace(last, work_done=float(result.epoch), epoch=result.epoch)


def _speeds(line: Line, setup: Setup) -> tuple[SpeedSample, ...]:
    if not line.has("step_s"):
        return ()
    step_s = line.number(
        "step_s", f"a number of seconds above 0, at most {LONGEST_S:g}", least=math.ulp(0.0), most=LONGEST_S
    )
    if step_s is None:
        return ()
    workers = setup.allocation.worker_count
    sync_s = line.number("sync_s", "a number from 0 to step_s", most=step_s)
    if sync_s is None:
        if line.has("sync_s"):
            return ()
        if workers > 1:
            line.problems.append(f"sync_s is missing; with {workers} workers it must come with step_s")
            return ()
        sync_s = 0.0
    return (
        SpeedSample(
            nodes=len(setup.allocation.nodes),
            workers=workers,
            servers=setup.allocation.server_count,
            atomic=setup.batch.atomic,
            step_s=step_s,
            sync_s=sync_s,
        ),
    )


def _noise(line: Line) -> NoiseSample | None:
    rule = f"a number from 0 to {LARGEST_GRADIENT:g}"
    sqr = line.number("grad_sqr", rule, most=LARGEST_GRADIENT)
    var = line.number("grad_var", rule, most=LARGEST_GRADIENT)
    if line.has("grad_sqr") != line.has("grad_var"):
        line.problems.append("one of grad_sqr and grad_var is missing; they must come together")
    return None if sqr is None or var is None else NoiseSample(sqr, var)


def _losses(line: Line, progress: Progress) -> tuple[LossPoint, ...]:
    if not line.has("loss") or progress.epoch <= progress.loss_epoch:
        return ()
    return tuple(LossPoint(progress.epoch, loss) for loss in line.measured("loss"))
