"""What a command prints about itself, line by line, and what its end means.

    {"epoch": 3, "accuracy": 0.91}

`epoch` counts completed ones, from 1; what is shown of an epoch 0 is passed over, and told of. Without it
lines are counted: those of a job that keeps checkpoints go on from the last epoch it showed, those of a
rigid job begin anew with every start. An epoch shows its result once; when a restarted command goes through
epochs again, their lines are passed over. Once a start has told an epoch, lines without one, such as those
of single steps, are no epochs and are passed over.

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
from typing import Any

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.events import JobReported
from stretto.core.job import Job
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample
from stretto.core.units import counted

MOST_EPOCHS = 10**6
"""Nobody trains longer; what counts further counts something else."""
MOST_WORK = 1e15
"""Steps; every smaller number of them is exact."""
LONGEST_S = 1e9
"""Of a step."""
LARGEST_GRADIENT = 1e30
"""Of a squared norm, so that no sum of them overflows."""


class OutputLine:
    """The values of one line; whatever is wrong with them is collected."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.problems: list[str] = []
        self.wrong = ""
        """Why its epoch or what it shows does not count, where people should know."""

    def has(self, key: str) -> bool:
        return key in self._values

    def gives(self, key: str) -> bool:
        """Whether it has the key with anything but null."""
        return self._values.get(key) is not None

    def shown(self, key: str) -> str:
        """What it has there, as people are told."""
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
        """Epochs that are completed; None, and `wrong`, if that makes no sense."""
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
        """Its epoch is one that the same start has passed."""
        self.wrong = f"epochs count up, and epoch {epoch} came after epoch {last}"
        self.problems.append("epochs that count down")

    def measured(self, key: str) -> tuple[float | None, ...]:
        """What was measured, None if it came out as no number; empty if it makes no sense."""
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
class Trial:
    """What must be known of a trial to read its reports."""

    metric: str
    last_epoch: int | None
    """It is done after this one."""


@dataclass(frozen=True, slots=True)
class EpochMark:
    """The last result line of the present start, whether it counted or not."""

    epoch: int = 0
    """If there was none yet: the epoch the start goes on from."""
    t_s: float | None = None
    counts: bool = True
    """Whether a line that does not say its epoch can be counted."""
    told: bool = False
    """Whether a line of this start has said its epoch: then those that do not are no epochs."""

    def epoch_s(self, epoch: int, t_s: float) -> float | None:
        """How long an epoch took since then; None if it cannot be known when it began."""
        return None if self.t_s is None or epoch <= self.epoch else (t_s - self.t_s) / (epoch - self.epoch)


@dataclass(frozen=True, slots=True)
class ShownResult:
    """What a result line shows."""

    mark: EpochMark
    result: Result | None = None
    """None if it is passed over."""
    wrong: str = ""
    """Why the metric that the line has does not count, where people should know."""


def read_result(
    line: OutputLine, trial: Trial, allocation: Allocation, *, known: int, mark: EpochMark, t_s: float
) -> ShownResult:
    """The result of a line, if results are known up to the epoch `known`."""
    values = line.measured(trial.metric) if line.has(trial.metric) else ()
    if line.has(trial.metric) and not values:
        return ShownResult(mark, wrong=_no_number(trial.metric, line.shown(trial.metric)))
    told = line.epoch()
    if not values or (told is None and (line.gives("epoch") or not mark.counts)):
        return ShownResult(mark)
    if told is None and mark.told:
        line.problems.append(f"{trial.metric} on lines without an epoch, where others have one")
        return ShownResult(mark)
    mark = replace(mark, told=mark.told or told is not None)
    epoch = mark.epoch + 1 if told is None else told
    if mark.t_s is not None and epoch < mark.epoch:
        line.go_back(epoch, mark.epoch)
        return ShownResult(mark)
    again = epoch == mark.epoch and mark.t_s is not None
    new_mark = mark if again else replace(mark, epoch=epoch, t_s=t_s)
    if problem := _passed_over(epoch, trial, known):
        line.problems.append(problem)
        return ShownResult(new_mark, wrong="" if epoch else _epoch_zero(trial.metric))
    epoch_s = mark.epoch_s(epoch, t_s)
    nodes = len(allocation.nodes)
    return ShownResult(new_mark, Result(epoch, values[0], epoch_s, allocation.worker_count, nodes))


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
    """Why a line is passed over; worded alike for many epochs, as it is said once per start."""
    if epoch == 0:
        return f"{trial.metric} of epoch 0; epochs are counted from 1, when they are completed"
    if epoch <= known:
        return f"{trial.metric} of epochs that were reported before"
    if trial.last_epoch is not None and epoch > trial.last_epoch:
        return f"{trial.metric} of epochs after {trial.last_epoch}, the last"
    return ""


KEYS = frozenset({"work_done", "epoch", "step_s", "sync_s", "loss", "grad_sqr", "grad_var"})
_START = EpochMark()


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
class CommandSetup:
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
    mark: EpochMark = _START
    """For the lines that follow in the same start."""
    wrong: str = ""
    """Of a trial: why the metric that the line has does not count, where people should know."""


def read_report(
    text: bytes, setup: CommandSetup, last: Progress, *, t_s: float, mark: EpochMark = _START
) -> Reading:
    """The report a line of output is, counting from the `last` one and, for a trial, from the `mark`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Reading(mark=mark)
    if not isinstance(values, dict) or setup.keys.isdisjoint(values):
        return Reading(mark=mark)
    line = OutputLine(values)
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


def _wrong(line: OutputLine, wrong: str) -> str:
    """What people should know of a line: why its metric does not count, or its epoch."""
    if wrong or not line.wrong:
        return wrong
    return f"it prints lines that do not count as they are: {line.wrong}; this is said once"


def _progress(line: OutputLine, last: Progress, mark: EpochMark) -> Progress:
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


def _speeds(line: OutputLine, setup: CommandSetup) -> tuple[SpeedSample, ...]:
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


def _noise(line: OutputLine) -> NoiseSample | None:
    rule = f"a number from 0 to {LARGEST_GRADIENT:g}"
    sqr = line.number("grad_sqr", rule, most=LARGEST_GRADIENT)
    var = line.number("grad_var", rule, most=LARGEST_GRADIENT)
    if line.has("grad_sqr") != line.has("grad_var"):
        line.problems.append("one of grad_sqr and grad_var is missing; they must come together")
    return None if sqr is None or var is None else NoiseSample(sqr, var)


def _losses(line: OutputLine, progress: Progress) -> tuple[LossPoint, ...]:
    if not line.has("loss") or progress.epoch <= progress.loss_epoch:
        return ()
    return tuple(LossPoint(progress.epoch, loss) for loss in line.measured("loss"))


@dataclass(frozen=True, slots=True)
class CommandGoal:
    """How far a command is to go; whatever it does after that does not count."""

    epochs: int | None
    """None: as far as it goes by itself."""
    metric: str | None
    """Of a trial: only epochs that show it count."""

    @classmethod
    def of(cls, job: Job, metric: str | None) -> CommandGoal:
        return cls(job.work.epochs, metric)

    def is_shown(self, progress: Progress) -> bool:
        """Whether the last epoch that counts was shown."""
        return self.epochs is not None and self._shown(progress) >= self.epochs

    def is_passed(self, reading: Reading) -> bool:
        """Whether a line shows an epoch after the last: the command will not end soon by itself."""
        told = 0 if reading.report is None else reading.report.epoch
        return self.epochs is not None and max(told, reading.mark.epoch) > self.epochs

    def why_ended(self, progress: Progress) -> str:
        """Why a command that had not ended by itself was asked to."""
        if self.is_shown(progress):
            shown = counted(self._shown(progress), "epoch")
            return f"its command was ended: it has shown {shown}, all that were asked for"
        return f"its command was ended: it went on after epoch {self.epochs}, the last that was asked for"

    def what_lacks(self, progress: Progress) -> str:
        """Of a command that has ended by itself; empty if it has shown all that was asked for."""
        if self.epochs is None or self.is_shown(progress):
            return ""
        shown = self._shown(progress)
        what = "" if self.metric is None else f" with {self.metric}"
        if self.metric is None and shown == self.epochs - 1:
            what = "; epochs count from 1, when they are completed"
        return f"its command ended by itself and has shown {shown} of {counted(self.epochs, 'epoch')}{what}"

    def _shown(self, progress: Progress) -> int:
        return progress.epoch if self.metric is None else progress.result_epoch


def failed_late(how: str) -> str:
    """Of a command that has shown all, and then failed."""
    return f"after the last epoch that was asked for its command failed: {how}"
