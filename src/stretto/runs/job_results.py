"""The result of jobs that were trained for real, read from the files of their run."""

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
    """The result of one job."""

    id: str
    state: str
    epochs: int
    jct_s: float | None
    """Seconds from submission to completion; None if it did not finish."""
    batch: int | None
    """The last batch over all workers, if the batch is adaptive."""
    restarts: int
    """Starts and resizes after the first start, also those after a resume."""
    retries: int
    """Restarts after failures."""
    metrics: Metrics
    """The metrics after its last epoch."""
    gpu_hours: float
    error: str
    """The traceback of a failed job."""
    log: Path
    checkpoint: Path | str | None
    """In a store, a URL."""
    files: Path | None = None
    """The folder that its command keeps files in, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run of jobs."""

    run: Path
    policy: str
    ended_by: str
    """jobs, stalled or request. If the run is not over: "unfinished" while it is live, "stopped" or
    "interrupted" (killed)."""
    finished_s: float
    mean_jct_s: float | None
    gpu_hours: float
    cost_usd: float
    jobs: tuple[JobResult, ...]
    damaged: tuple[str, ...] = ()
    """A sentence for each damaged checkpoint."""
    known_until_s: float | None = None
    """The time of the last event before the damage, if the journal is damaged."""

    @property
    def succeeded(self) -> bool:
        """Whether every job finished."""
        return self.ended_by == EndedBy.JOBS and all(job.state == JobPhase.FINISHED for job in self.jobs)

    def as_dict(self) -> dict[str, Any]:
        """As a JSON-serialisable dict."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str, allow_nan=False))  # type: ignore[no-any-return]


def run_result(folder: RunFolder, ended_by: EndedBy | None) -> RunResult:
    """The result of a run of jobs so far."""
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
