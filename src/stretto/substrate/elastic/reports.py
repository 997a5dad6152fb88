"""From the reports of a group's rank 0 to the events for the controller."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from stretto.core.events import CheckpointSaved, JobNoted, JobReported
from stretto.core.job import Job
from stretto.core.observations import LossPoint, Result
from stretto.substrate.elastic.command_output import Progress
from stretto.system.plain_json import parse_json
from stretto.wire.messages import EpochEnd, Report, Saved

_NOT_VALUES = frozenset({"epoch", "workers", "batch"})


@dataclass(frozen=True, slots=True)
class Held:
    """A report that waits, and the size of the job when it came."""

    report: Report
    workers: int
    nodes: int


class Account(Protocol):
    """The reports of one job, and which of them became events."""

    @property
    def reached(self) -> Progress:
        """The progress of the job; it tells whether there was any between two losses."""

    def tell(self, *, t_s: float, resize_s: float | None = None) -> Sequence[JobReported | JobNoted]:
        """Events of all reports that wait; `resize_s` goes with the last one."""


@dataclass(slots=True)
class TrainingAccount:
    """The account of a job that trains a function.

    A group that fell back to a checkpoint repeats epochs; each epoch is reported once.
    """

    job: Job
    metric: str | None
    epoch: int = 0
    """Epochs that were reported."""
    furthest: float = 0.0
    """The latest checkpoint, in epochs. An epoch that was reported but not saved is trained again."""
    held: list[Held] = field(default_factory=list)
    """Reports that wait. After a PARK they wait for the next start, or for the end of the job or run."""
    written: Callable[[int, int], list[Held]] | None = None
    """Epochs after a given one that the job wrote to its metrics file, given its number of nodes."""
    misses_metric: bool = False
    """Whether a note said that an epoch came without the metric."""

    @property
    def reached(self) -> Progress:
        return Progress(work_done=self.furthest * self.job.work.units_per_epoch, epoch=self.epoch)

    def tell(self, *, t_s: float, resize_s: float | None = None) -> list[JobReported | JobNoted]:
        reports, self.held = self._without_gaps(), []
        notes = [note for one in reports for note in self._missing(one.report, t_s)]
        events = [self._event(one, t_s) for one in reports]
        told = [replace(event, resize_s=resize_s if event is events[-1] else None) for event in events]
        return [*notes, *told]

    def make_up(self, nodes: int) -> None:
        """Add the epochs that are in the job's metrics file but were not reported."""
        heard, last = max([self.epoch, *(one.report.epoch for one in self.held)]), self.job.work.epochs
        if self.written is not None and (last is None or heard < last):
            self.held += self.written(heard, nodes)

    def saved(self, saved: Saved, *, t_s: float) -> CheckpointSaved:
        self.furthest = max(self.furthest, saved.progress)
        return CheckpointSaved(
            t_s=t_s,
            job_id=self.job.id,
            work_done=saved.progress * self.job.work.units_per_epoch,
            path=saved.path,
            best=saved.best,
        )

    def _without_gaps(self) -> list[Held]:
        """The reports without gaps.

        A lost group may have saved epochs that it did not report, and the next group continued after them.
        """
        whole: list[Held] = []
        reached = self.epoch
        for one in self.held:
            before = one.report.epoch - len(one.report.ends)
            if before > reached and self.written is not None:
                whole += [held for held in self.written(reached, one.nodes) if held.report.epoch <= before]
            whole.append(one)
            reached = max(reached, one.report.epoch)
        return whole

    def _missing(self, report: Report, t_s: float) -> list[JobNoted]:
        """A note about the first epoch without the metric: it has no result at all."""
        without = [end for end in report.ends if self.metric is not None and self._value(end) is None]
        if not without or self.misses_metric:
            return []
        self.misses_metric = True
        names = ", ".join(sorted(without[0].values)) or "nothing"
        text = (
            f"epoch {without[0].epoch} has no result: the study compares {self.metric}, and {names} was "
            f"reported. Give run.report a value for {self.metric}; this is said once."
        )
        return [JobNoted(t_s=t_s, job_id=self.job.id, text=text)]

    def _value(self, end: EpochEnd) -> float | None:
        """The metric of an epoch; the metric "epoch" is its number."""
        return {**end.values, "epoch": float(end.epoch)}.get(self.metric or "")

    def _event(self, held: Held, t_s: float) -> JobReported:
        report = held.report
        new = [end for end in report.ends if end.epoch > self.epoch]
        losses = [LossPoint(end.epoch, _finite(end.values["loss"])) for end in new if "loss" in end.values]
        results: list[Result] = []
        if self.metric is not None:
            results = [
                Result(end.epoch, _finite(value), end.epoch_s, held.workers, held.nodes)
                for end in new
                if (value := self._value(end)) is not None
            ]
        self.epoch = max(self.epoch, report.epoch)
        return JobReported(
            t_s=t_s,
            job_id=self.job.id,
            work_done=report.progress * self.job.work.units_per_epoch,
            epoch=self.epoch,
            speeds=report.speeds,
            noise=report.noise,
            losses=tuple(losses),
            results=tuple(results),
        )


def untold(metrics: Path, epoch: int, nodes: int) -> list[Held]:
    """Epochs after this one in a job's metrics file, in order: a killed controller did not record them.

    `nodes` is the most that the job was on.
    """
    found: dict[int, Held] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        held = _read(line, nodes)
        if held is not None and held.report.epoch > epoch:
            found[held.report.epoch] = held
    return [held for _, held in sorted(found.items())]


def _read(line: str, nodes: int) -> Held | None:
    """None for a line that was not written completely."""
    try:
        fields = parse_json(line, finite=False)
        values = {key: math.nan if value is None else float(value) for key, value in fields.items()}
        epoch, workers = int(values["epoch"]), int(values["workers"])
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None
    reported = {key: value for key, value in values.items() if key not in _NOT_VALUES}
    end = EpochEnd(epoch=epoch, values=reported, epoch_s=None)
    return Held(Report(progress=epoch, epoch=epoch, steps=0, ends=(end,)), workers, min(nodes, workers))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
