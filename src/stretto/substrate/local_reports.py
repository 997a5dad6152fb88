"""From what a group's leader says to what the controller is told."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.events import CheckpointSaved, JobReported
from stretto.core.job import Job
from stretto.core.observations import LossPoint, Result
from stretto.substrate.process_reports import Progress
from stretto.wire.messages import EpochEnd, Report, Saved

_NOT_VALUES = frozenset({"epoch", "workers", "batch"})


@dataclass(slots=True)
class Account:
    """What was told of one job. A group that fell back to a checkpoint repeats epochs; they are told once."""

    job: Job
    metric: str | None
    epoch: int = 0
    """Epochs told of."""
    furthest: float = 0.0
    """Of checkpoints, in epochs. Epochs that were told and not saved are trained again, which is progress."""

    held: list[Report] = field(default_factory=list)
    """What was not told when it was reported: it is told with the next report."""

    @property
    def reached(self) -> Progress:
        return Progress(work_done=self.furthest * self.job.work.units_per_epoch, epoch=self.epoch)

    def tell(
        self, *reports: Report, workers: int, nodes: int, t_s: float, resize_s: float | None = None
    ) -> list[JobReported]:
        """Of these reports, and of those held back before."""
        all_reports, self.held = [*self.held, *reports], []
        events = [self._event(one, workers, nodes, t_s) for one in all_reports]
        return [replace(event, resize_s=resize_s if event is events[-1] else None) for event in events]

    def saved(self, saved: Saved, *, t_s: float) -> CheckpointSaved:
        self.furthest = max(self.furthest, saved.progress)
        return CheckpointSaved(
            t_s=t_s,
            job_id=self.job.id,
            work_done=saved.progress * self.job.work.units_per_epoch,
            path=saved.path,
            best=saved.best,
        )

    def _event(self, report: Report, workers: int, nodes: int, t_s: float) -> JobReported:
        new = [end for end in report.ends if end.epoch > self.epoch]
        losses = [LossPoint(end.epoch, _finite(end.values["loss"])) for end in new if "loss" in end.values]
        results: list[Result] = []
        if self.metric is not None:
            results = [
                Result(end.epoch, _finite(end.values.get(self.metric)), end.epoch_s, workers, nodes)
                for end in new
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


def untold(metrics: Path, epoch: int) -> list[Report]:
    """Epochs after this one that a job's metrics file has, in order: nobody lived to tell of them."""
    ends: dict[int, EpochEnd] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        end = _read(line)
        if end is not None and end.epoch > epoch:
            ends[end.epoch] = end
    return [
        Report(progress=end.epoch, epoch=end.epoch, steps=0, ends=(end,)) for _, end in sorted(ends.items())
    ]


def _read(line: str) -> EpochEnd | None:
    """None for a line that was not written to its end."""
    try:
        fields = json.loads(line)
        values = {key: math.nan if value is None else float(value) for key, value in fields.items()}
        return EpochEnd(
            epoch=int(values["epoch"]),
            values={key: value for key, value in values.items() if key not in _NOT_VALUES},
            epoch_s=None,
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
