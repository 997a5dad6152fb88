"""What a command prints about itself: one JSON object per line of its standard output.

    {"work_done": 120, "epoch": 3, "step_s": 0.11, "sync_s": 0.02, "loss": 0.5, "grad_sqr": 1, "grad_var": 9}

    work_done   statistical units done so far (steps at the initial batch size)
    epoch       epochs completed
    step_s      mean time of one optimisation step since the last line, without accumulation passes
    sync_s      the part of it that waits for the exchange of gradients; needed with several workers
    loss        training loss of the epoch just completed; the first one of each epoch counts
    grad_sqr, grad_var   gradient statistics at the initial batch size, both or none

Every key may be left out. A line without any of them is not a report.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.events import JobReported
from stretto.core.observations import LossPoint, NoiseSample, SpeedSample

KEYS = frozenset({"work_done", "epoch", "step_s", "sync_s", "loss", "grad_sqr", "grad_var"})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come, as last reported."""

    work_done: float = 0.0
    epoch: int = 0
    loss_epoch: int = 0
    """The last epoch whose loss is known."""

    def after(self, report: JobReported) -> Progress:
        loss_epochs = [point.epoch for point in report.losses]
        return Progress(report.work_done, report.epoch, max([self.loss_epoch, *loss_epochs]))


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command runs with: the configuration its measurements belong to."""

    job_id: str
    allocation: Allocation
    batch: BatchChoice


@dataclass(frozen=True, slots=True)
class Reading:
    """A line as understood: the report, if it is one, and what had to be left out of it."""

    report: JobReported | None = None
    problems: tuple[str, ...] = ()


class _Line:
    """The values of one line; whatever is wrong with them is collected."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.problems: list[str] = []

    def has(self, key: str) -> bool:
        return key in self._values

    def number(self, key: str, rule: str, *, least: float = 0.0, most: float = math.inf) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        as_float = _as_float(value)
        if as_float is None or not math.isfinite(as_float) or not least <= as_float <= most:
            self.problems.append(f"{key} is {str(value)[:40]!r}; it must be {rule}")
            return None
        return as_float


def read_report(text: bytes, setup: Setup, last: Progress, *, t_s: float) -> Reading:
    """The report a line of output is, counting from the `last` one."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Reading()
    if not isinstance(values, dict) or KEYS.isdisjoint(values):
        return Reading()
    line = _Line(values)
    work_done = line.number("work_done", "a number >= 0")
    epoch = _epoch(line)
    progress = replace(
        last,
        work_done=last.work_done if work_done is None else work_done,
        epoch=last.epoch if epoch is None else epoch,
    )
    report = JobReported(
        t_s=t_s,
        job_id=setup.job_id,
        work_done=progress.work_done,
        epoch=progress.epoch,
        speeds=_speeds(line, setup),
        noise=_noise(line),
        losses=_losses(values, line, progress),
    )
    return Reading(report, tuple(line.problems))


def _epoch(line: _Line) -> int | None:
    rule = "a whole number >= 0"
    epoch = line.number("epoch", rule)
    if epoch is not None and not epoch.is_integer():
        line.problems.append(f"epoch is {epoch}; it must be {rule}")
        return None
    return None if epoch is None else int(epoch)


def _speeds(line: _Line, setup: Setup) -> tuple[SpeedSample, ...]:
    if not line.has("step_s"):
        return ()
    step_s = line.number("step_s", "a number > 0", least=math.ulp(0.0))
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


def _noise(line: _Line) -> NoiseSample | None:
    sqr = line.number("grad_sqr", "a number >= 0")
    var = line.number("grad_var", "a number >= 0")
    if line.has("grad_sqr") != line.has("grad_var"):
        line.problems.append("one of grad_sqr and grad_var is missing; they must come together")
    return None if sqr is None or var is None else NoiseSample(sqr, var)


def _losses(values: dict[str, Any], line: _Line, progress: Progress) -> tuple[LossPoint, ...]:
    if "loss" not in values or progress.epoch <= progress.loss_epoch:
        return ()
    loss = _as_float(values["loss"])
    if loss is None and values["loss"] is not None:
        line.problems.append(f"loss is {str(values['loss'])[:40]!r}; it must be a number or null")
        return ()
    return (LossPoint(progress.epoch, loss if loss is not None and math.isfinite(loss) else None),)


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
