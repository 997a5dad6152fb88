"""What a real run of jobs came to."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.core.units import HOUR_S
from stretto.journal.folds.cost import CostMeter
from stretto.journal.folds.history import History, fed_to, history_of
from stretto.pricing.instances import OWN_MACHINE
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import (
    RunFolder,
)
from stretto.runs.live_state import JobPhase, LiveJob, LiveState
from stretto.runs.metrics_files import Metrics, metrics_by_epoch
from stretto.runs.results import command_files, damaged_checkpoints, kept_checkpoint
from stretto.runs.status import shown_state, status_of


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """One job."""

    id: str
    state: str
    epochs: int
    jct_s: float | None
    """From submission to completion; None if it did not finish."""
    batch: int | None
    """Of a job whose batch may be adapted: the last one, of all workers together."""
    restarts: int
    """Starts and resizes after the first start, also those of a run that goes on."""
    retries: int
    """After failures, where it was."""
    metrics: Metrics
    """What it reported after its last epoch."""
    gpu_hours: float
    error: str
    """Of a job that failed: its own traceback, and where its log is."""
    log: Path
    checkpoint: Path | str | None
    """A URL if that is where it is kept."""
    files: Path | None = None
    """The folder of its command, if it keeps something there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run of jobs came to."""

    run: Path
    policy: str
    ended_by: str
    """jobs, stalled or request. Of a run that is not over: "unfinished" while it goes on, "stopped" if it
    was asked to, "interrupted" if it was killed."""
    finished_s: float
    mean_jct_s: float | None
    gpu_hours: float
    cost_usd: float
    jobs: tuple[JobResult, ...]
    damaged: tuple[str, ...] = ()
    """Checkpoints that are not as they were written, in words."""
    known_until_s: float | None = None
    """Of a run whose journal is damaged: when the last event before the damage was."""

    @property
    def succeeded(self) -> bool:
        """Every job finished."""
        return self.ended_by == EndedBy.JOBS and all(job.state == JobPhase.FINISHED for job in self.jobs)

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str, allow_nan=False))  # type: ignore[no-any-return]


def run_result(folder: RunFolder, ended_by: EndedBy | None) -> RunResult:
    """The summary of a run of jobs, over or not."""
    spec = folder.begun_spec()
    live, meter = LiveState(), CostMeter((), OWN_MACHINE, spec.usd_per_slot_hour)
    history = history_of(fed_to(folder.events(), live, meter))
    status = status_of(folder, live.last) if ended_by is None else str(ended_by)
    jobs = tuple(_job_result(folder, history, line, status) for line in live.jobs.values())
    jcts = [job.jct_s for job in jobs if job.jct_s is not None]
    return RunResult(
        run=folder.path,
        policy=spec.policy,
        ended_by=str(status),
        finished_s=live.now_s,
        mean_jct_s=fmean(jcts) if jcts else None,
        gpu_hours=sum(job.gpu_hours for job in jobs),
        cost_usd=meter.cost_usd(live.now_s),
        jobs=jobs,
        damaged=tuple(
            text
            for line in live.jobs.values()
            if line.started_s is not None
            for text in damaged_checkpoints(folder, line)
        ),
        known_until_s=folder.known_until_s(),
    )


def _job_result(folder: RunFolder, history: History, line: LiveJob, status: str) -> JobResult:
    past, has_files = history.jobs[line.job.id], line.started_s is not None
    return JobResult(
        id=line.job.id,
        state=shown_state(line.phase, status),
        epochs=line.epoch,
        jct_s=past.jct_s,
        batch=past.last_batch,
        restarts=past.restarts,
        retries=line.retries,
        metrics=metrics_by_epoch(folder, line.job.id).get(line.epoch, {}) if has_files else {},
        gpu_hours=past.gpu_s / HOUR_S,
        error=line.error if line.phase is JobPhase.FAILED else "",
        log=folder.log(line.job.id),
        checkpoint=kept_checkpoint(folder, line) if has_files else None,
        files=command_files(folder, line.job.id) if has_files else None,
    )
