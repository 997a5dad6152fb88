"""What a trial's command prints after each epoch: the study's metric, and best also the epoch.

    {"epoch": 3, "accuracy": 0.91}

`epoch` counts completed ones, from 1; what is shown of an epoch 0 is passed over, and told of. Without it
lines are counted: those of a job that keeps checkpoints go on from the last epoch it showed, those of a
rigid job begin anew with every start. An epoch shows its result once; when a restarted command goes through
epochs again, their lines are passed over. Once a start has told an epoch, lines without one, such as those
of single steps, are no epochs and are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.core.allocation import Allocation
from stretto.core.observations import Result
from stretto.substrate.process_lines import Line


@dataclass(frozen=True, slots=True)
class Trial:
    """What must be known of a trial to read its reports."""

    metric: str
    last_epoch: int | None
    """It is done after this one."""


@dataclass(frozen=True, slots=True)
class Mark:
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
class Shown:
    """What a result line shows."""

    mark: Mark
    result: Result | None = None
    """None if it is passed over."""
    wrong: str = ""
    """Why the metric that the line has does not count, where people should know."""


def read_result(
    line: Line, trial: Trial, allocation: Allocation, *, known: int, mark: Mark, t_s: float
) -> Shown:
    """The result of a line, if results are known up to the epoch `known`."""
    values = line.measured(trial.metric) if line.has(trial.metric) else ()
    if line.has(trial.metric) and not values:
        return Shown(mark, wrong=_no_number(trial.metric, line.shown(trial.metric)))
    told = line.epoch()
    if not values or (told is None and (line.gives("epoch") or not mark.counts)):
        return Shown(mark)
    if told is None and mark.told:
        line.problems.append(f"{trial.metric} on lines without an epoch, where others have one")
        return Shown(mark)
    mark = replace(mark, told=mark.told or told is not None)
    epoch = mark.epoch + 1 if told is None else told
    if mark.t_s is not None and epoch < mark.epoch:
        line.go_back(epoch, mark.epoch)
        return Shown(mark)
    again = epoch == mark.epoch and mark.t_s is not None
    new_mark = mark if again else replace(mark, epoch=epoch, t_s=t_s)
    if problem := _passed_over(epoch, trial, known):
        line.problems.append(problem)
        return Shown(new_mark, wrong="" if epoch else _epoch_zero(trial.metric))
    epoch_s = mark.epoch_s(epoch, t_s)
    nodes = len(allocation.nodes)
    return Shown(new_mark, Result(epoch, values[0], epoch_s, allocation.worker_count, nodes))


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
