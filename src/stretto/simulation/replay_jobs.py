"""Replays the jobs of a real run under other policies, in simulated time.

The truth about a job is the speed model fitted to its steps, slowed down to its recorded progress, and its
measured gradient noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from stretto.core.cluster import Node
from stretto.core.events import Event, JobReported, RunStarted
from stretto.core.job import Job
from stretto.core.observations import SpeedSample
from stretto.journal.folds.history import Hold, JobHistory, ProgressPoint, history_of
from stretto.models.belief import Observations
from stretto.models.noise import step_gain
from stretto.models.resize import WARM_RESIZE_S
from stretto.models.speed import AllReduceSpeed
from stretto.policies.registry import Options
from stretto.simulation.jobs import Setup, SimulationResult, simulate
from stretto.worlds.applications import ModelTruth
from stretto.worlds.replay import RecordedJob, slowed
from stretto.worlds.truth import Workload, make_workload

USUAL_INTERVAL_S = 60.0


def replay_jobs(
    events: Iterable[Event], policies: Sequence[str], *, options: Options | None = None, seed: int = 0
) -> tuple[SimulationResult, ...]:
    """Replays the jobs of a real run under these policies."""
    known = list(events)
    workload = recorded_workload(known)
    started = next((event for event in known if isinstance(event, RunStarted)), None)
    setup = Setup(
        nodes=_nodes(known),
        interval_s=_interval_s(started),
        restart_s=_restart_s(known),
        believed_restart_s=WARM_RESIZE_S,
        seed=seed,
    )
    chosen = options or {}
    return tuple(simulate(workload, policy, setup, options=chosen.get(policy)) for policy in policies)


def recorded_workload(events: Sequence[Event]) -> Workload:
    """The jobs that ran, with what they measured as the truth."""
    speeds: dict[str, Observations] = {}
    for event in events:
        if isinstance(event, JobReported):
            for sample in event.speeds:
                speeds.setdefault(event.job_id, Observations()).add_speed(sample)
    histories = history_of(events).jobs
    pairs = []
    for job_id, seen in speeds.items():
        recorded = _record(histories[job_id], tuple(seen.speeds.values()))
        pairs.append((recorded.job, _truth(recorded, histories[job_id])))
    silent = [job_id for job_id in histories if job_id not in speeds]
    notes = (f"{', '.join(silent)} showed no steps and are left out.",) if silent else ()
    return make_workload("replay", pairs, notes)


def _record(history: JobHistory, speeds: tuple[SpeedSample, ...]) -> RecordedJob:
    job = history.job
    done = history.progress[-1].work_done / job.work.units_per_epoch
    epochs = job.work.epochs if job.work.epochs is not None else max(round(done), 1)
    total = epochs * job.work.units_per_epoch
    noise = tuple((one.work_done / total, one.noise) for one in history.progress if one.noise is not None)
    return RecordedJob(job, epochs, speeds, noise, tuple(history.losses))


def _truth(recorded: RecordedJob, history: JobHistory) -> ModelTruth:
    speed = recorded.speed()
    return recorded.truth(slowed(speed, _slowness(history, recorded.truth(speed), speed)))


def _slowness(history: JobHistory, truth: ModelTruth, speed: AllReduceSpeed) -> float:
    """Time of the work over that of its steps; the rest is validation, checkpoints, waiting for data."""
    expected = done = 0.0
    for hold in history.holds:
        for before, after in pairwise(_within(hold, history.progress)):
            expected += (after.t_s - before.t_s) * _rate(history.job, hold, truth, speed, before)
            done += after.work_done - before.work_done
    return expected / done if expected > 0.0 and done > 0.0 else 1.0


def _within(hold: Hold, progress: Sequence[ProgressPoint]) -> list[ProgressPoint]:
    begin_s = hold.start_s + hold.resizing_s
    return [one for one in progress if begin_s <= one.t_s <= hold.end_s]


def _rate(job: Job, hold: Hold, truth: ModelTruth, speed: AllReduceSpeed, at: ProgressPoint) -> float:
    """Statistical units a second of the steps alone."""
    workers, batch = hold.allocation.worker_count, hold.batch
    epoch = min(int(at.work_done / job.work.units_per_epoch), truth.epochs - 1)
    total = batch.total(workers)
    gain = step_gain(truth.noise_at(total, epoch), job.batch.initial, total)
    step_s = speed.step_s(len(hold.allocation.workers), workers, batch.atomic, batch.accumulation)
    return gain / float(step_s)


def _nodes(events: Sequence[Event]) -> tuple[Node, ...]:
    return next((event.nodes for event in events if isinstance(event, RunStarted)), ())


def _interval_s(started: RunStarted | None) -> float:
    """The interval with which the run was started."""
    if started is None:
        return USUAL_INTERVAL_S
    return float(started.identity.get(f"{started.subject}.interval_s", USUAL_INTERVAL_S))


def _restart_s(events: Sequence[Event]) -> float:
    times_s = [
        event.resize_s for event in events if isinstance(event, JobReported) and event.resize_s is not None
    ]
    return median(times_s) if times_s else 0.0
