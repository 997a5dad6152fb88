"""Reads the lines that a command prints as reports, and judges its end.

    {"epoch": 3, "accuracy": 0.91}

`epoch` counts completed epochs, from 1; epoch 0 is ignored, with a note. Lines without `epoch` are counted: a
job that keeps checkpoints continues after its last epoch, a rigid job begins again at 1 with every start.
Each epoch has one result; if a restarted command repeats epochs, their lines are ignored. Once a start has
printed an `epoch`, its lines without one (of single steps, for example) are ignored.

    {"work_done": 120, "epoch": 3, "step_s": 0.11, "sync_s": 0.02, "loss": 0.5, "grad_sqr": 1, "grad_var": 9}

    work_done   statistical units done so far (steps at the initial batch size)
    epoch       epochs completed
    step_s      mean time of one optimisation step since the last line, without accumulation passes
    sync_s      the part of it that waits for the exchange of gradients; needed with several workers
    loss        training loss of the epoch just completed; the first one of each epoch counts
    grad_sqr, grad_var   gradient statistics at the initial batch size, both or none

Every key may be left out. A line without any of them is not a report.

The lines of a trial count if they have the study's metric: {"epoch": 3, "accuracy": 0.91} or
{"accuracy": 0.91}. Other lines only add measurements.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.events import JobReported
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample
from stretto.core.units import counted

KEYS = frozenset({"work_done", "epoch", "step_s", "sync_s", "loss", "grad_sqr", "grad_var"})
MOST_EPOCHS = 10**6
"""A larger number counts something else, such as steps."""
MOST_WORK = 1e15
"""In steps; every smaller number is exact."""
LONGEST_S = 1e9
"""The longest step."""
LARGEST_GRADIENT = 1e30
"""The largest squared norm, so that no sum overflows."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The metric and length of a trial, which its reports depend on."""

    metric: str
    last_epoch: int | None
    """The trial is done after this epoch."""


@dataclass(frozen=True, slots=True)
class EpochMark:
    """The last result line of the present start, even if it did not count."""

    epoch: int = 0
    """The epoch of that line; before the first one, the epoch from which the start continues."""
    t_s: float | None = None
    counts: bool = True
    """Whether lines without an epoch are counted."""
    told: bool = False
    """Whether a line of this start had an epoch, so that lines without one are ignored."""

    def epoch_s(self, epoch: int, t_s: float) -> float | None:
        """The seconds of an epoch since this mark; None if its beginning is unknown."""
        return None if self.t_s is None or epoch <= self.epoch else (t_s - self.t_s) / (epoch - self.epoch)


_START = EpochMark()


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job, as last reported."""

    work_done: float = 0.0
    epoch: int = 0
    loss_epoch: int = 0
    """The last epoch whose loss is known."""
    result_epoch: int = 0
    """The last epoch of a trial whose result is known."""

    def after(self, report: JobReported) -> Progress:
        return Progress(
            report.work_done,
            report.epoch,
            max([self.loss_epoch, *(point.epoch for point in report.losses)]),
            max([self.result_epoch, *(result.epoch for result in report.results)]),
        )


@dataclass(frozen=True, slots=True)
class CommandSetup:
    """The configuration that a command runs with."""

    job_id: str
    allocation: Allocation
    batch: BatchChoice
    trial: Trial | None = None

    @property
    def keys(self) -> frozenset[str]:
        """A report has at least one of these keys."""
        return KEYS if self.trial is None else KEYS | {self.trial.metric}


@dataclass(frozen=True, slots=True)
class Reading:
    """What a line means: the report, if it is one, and the problems with it."""

    report: JobReported | None = None
    problems: tuple[str, ...] = ()
    mark: EpochMark = _START
    """The mark for the next lines of the same start."""
    wrong: str = ""
    """Why the metric in the line does not count, if the user should know."""


@dataclass(frozen=True, slots=True)
class CommandGoal:
    """How far a command has to go; later epochs do not count."""

    epochs: int | None
    """None: until it ends by itself."""
    metric: str | None
    """The metric of a trial; only epochs that show it count."""

    def is_shown(self, progress: Progress) -> bool:
        """Whether the last epoch that counts was shown."""
        return self.epochs is not None and self._shown(progress) >= self.epochs

    def is_passed(self, reading: Reading) -> bool:
        """Whether a line shows an epoch after the last one, so that the command will not end by itself."""
        told = 0 if reading.report is None else reading.report.epoch
        return self.epochs is not None and max(told, reading.mark.epoch) > self.epochs

    def why_ended(self, progress: Progress) -> str:
        """Why a command was asked to end."""
        if self.is_shown(progress):
            shown = counted(self._shown(progress), "epoch")
            return f"its command was ended: it has shown {shown}, all that were asked for"
        return f"its command was ended: it continued after epoch {self.epochs}, the last one requested"

    def what_lacks(self, progress: Progress) -> str:
        """What a command that ended by itself has not shown; empty if it has shown everything."""
        if self.epochs is None or self.is_shown(progress):
            return ""
        shown = self._shown(progress)
        what = "" if self.metric is None else f" with {self.metric}"
        if self.metric is None and shown == self.epochs - 1:
            what = "; epochs count from 1, when they are completed"
        return f"its command ended by itself and has shown {shown} of {counted(self.epochs, 'epoch')}{what}"

    def _shown(self, progress: Progress) -> int:
        return progress.epoch if self.metric is None else progress.result_epoch


def read_report(
    text: bytes, setup: CommandSetup, last: Progress, *, t_s: float, mark: EpochMark = _START
) -> Reading:
    """Read a line of output. Epochs count from the `last` progress and, for a trial, from the `mark`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Reading(mark=mark)
    if not isinstance(values, dict) or setup.keys.isdisjoint(values):
        return Reading(mark=mark)
    line = _OutputLine(values)
    shown = None
    if setup.trial is not None:
        known = last.result_epoch
        shown = _read_result(line, setup.trial, setup.allocation, known=known, mark=mark, t_s=t_s)
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


def _progress(line: _OutputLine, last: Progress, mark: EpochMark) -> Progress:
    """Within one start epochs do not go back; a new start may begin again."""
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
    """The work of a trial counts in epochs, and only results are progress."""
    return last if result is None else replace(last, work_done=float(result.epoch), epoch=result.epoch)


def _wrong(line: _OutputLine, wrong: str) -> str:
    """What the user should know about a line whose metric or epoch does not count."""
    if wrong or not line.wrong:
        return wrong
    return f"it prints lines that do not count as they are: {line.wrong}; this is said once"


class _OutputLine:
    """The values of one line; problems with them are collected."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.problems: list[str] = []
        self.wrong = ""
        """Why its epoch or metric does not count, if the user should know."""

    def has(self, key: str) -> bool:
        return key in self._values

    def gives(self, key: str) -> bool:
        """Whether it has the key, with a value other than null."""
        return self._values.get(key) is not None

    def shown(self, key: str) -> str:
        """The value for a message."""
        return repr(str(self._values[key])[:40])

    def number(self, key: str, rule: str, *, least: float = 0.0, most: float = math.inf) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        as_float = _as_float(value)
        if as_float is None or not math.isfinite(as_float) or not least <= as_float <= most:
            self.problems.append(f"{key} is {self.shown(key)}; it must be {rule}")
            return None
        return as_float

    def epoch(self) -> int | None:
        """Completed epochs; None, and `wrong` is set, if the value makes no sense."""
        rule = f"a whole number from 0 to {MOST_EPOCHS}"
        epoch = self.number("epoch", rule, most=MOST_EPOCHS)
        if epoch is not None and epoch.is_integer():
            return int(epoch)
        if epoch is not None:
            self.problems.append(f"epoch is {self.shown('epoch')}; it must be {rule}")
        if self.gives("epoch"):
            self.wrong = self.problems[-1]
        return None

    def go_back(self, epoch: int, last: int) -> None:
        """Note that its epoch is below an earlier one of the same start."""
        self.wrong = f"epochs count up, and epoch {epoch} came after epoch {last}"
        self.problems.append("epochs that count down")

    def measured(self, key: str) -> tuple[float | None, ...]:
        """The measured value, None if it is not finite; empty if it is no measurement."""
        value = self._values[key]
        as_float = _as_float(value)
        if as_float is None and value is not None:
            self.problems.append(f"{key} is {self.shown(key)}; it must be a number or null")
            return ()
        if isinstance(value, int) and as_float is not None and math.isinf(as_float):
            self.wrong = f"{key} is {self.shown(key)}, too large for a number, and counts as none"
            self.problems.append(self.wrong)
        return (as_float if as_float is not None and math.isfinite(as_float) else None,)


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class _ShownResult:
    """The result in a line."""

    mark: EpochMark
    result: Result | None = None
    """None if the line is ignored."""
    wrong: str = ""
    """Why the metric in the line does not count, if the user should know."""


def _read_result(
    line: _OutputLine, trial: Trial, allocation: Allocation, *, known: int, mark: EpochMark, t_s: float
) -> _ShownResult:
    """The result in a line; results up to the epoch `known` are known."""
    values = line.measured(trial.metric) if line.has(trial.metric) else ()
    if line.has(trial.metric) and not values:
        return _ShownResult(mark, wrong=_no_number(trial.metric, line.shown(trial.metric)))
    told = line.epoch()
    if not values or (told is None and (line.gives("epoch") or not mark.counts)):
        return _ShownResult(mark)
    if told is None and mark.told:
        line.problems.append(f"{trial.metric} on lines without an epoch, where others have one")
        return _ShownResult(mark)
    mark = replace(mark, told=mark.told or told is not None)
    epoch = mark.epoch + 1 if told is None else told
    if mark.t_s is not None and epoch < mark.epoch:
        line.go_back(epoch, mark.epoch)
        return _ShownResult(mark)
    again = epoch == mark.epoch and mark.t_s is not None
    new_mark = mark if again else replace(mark, epoch=epoch, t_s=t_s)
    if problem := _passed_over(epoch, trial, known):
        line.problems.append(problem)
        return _ShownResult(new_mark, wrong="" if epoch else _epoch_zero(trial.metric))
    epoch_s = mark.epoch_s(epoch, t_s)
    nodes = len(allocation.nodes)
    return _ShownResult(new_mark, Result(epoch, values[0], epoch_s, allocation.worker_count, nodes))


def _no_number(metric: str, shown: str) -> str:
    return (
        f"an epoch has no result: {metric} was shown as {shown}, which is not a number. Print a number, or "
        "null where there is none; this is said once."
    )


def _epoch_zero(metric: str) -> str:
    return (
        f"epochs count from 1, when they are completed: {metric} of epoch 0 was passed over. "
        "Print epoch + 1; this is said once."
    )


def _passed_over(epoch: int, trial: Trial, known: int) -> str:
    """Why a line is ignored. The text does not name the epoch, as each text is logged once per start."""
    if epoch == 0:
        return f"{trial.metric} of epoch 0; epochs are counted from 1, when they are completed"
    if epoch <= known:
        return f"{trial.metric} of epochs that were reported before"
    if trial.last_epoch is not None and epoch > trial.last_epoch:
        return f"{trial.metric} of epochs after {trial.last_epoch}, the last"
    return ""


def _speeds(line: _OutputLine, setup: CommandSetup) -> tuple[SpeedSample, ...]:
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


def _noise(line: _OutputLine) -> NoiseSample | None:
    rule = f"a number from 0 to {LARGEST_GRADIENT:g}"
    sqr = line.number("grad_sqr", rule, most=LARGEST_GRADIENT)
    var = line.number("grad_var", rule, most=LARGEST_GRADIENT)
    if line.has("grad_sqr") != line.has("grad_var"):
        line.problems.append("one of grad_sqr and grad_var is missing; they must come together")
    return None if sqr is None or var is None else NoiseSample(sqr, var)


def _losses(line: _OutputLine, progress: Progress) -> tuple[LossPoint, ...]:
    if not line.has("loss") or progress.epoch <= progress.loss_epoch:
        return ()
    return tuple(LossPoint(progress.epoch, loss) for loss in line.measured("loss"))
