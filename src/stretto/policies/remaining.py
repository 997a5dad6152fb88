"""How long a job still takes at the size its owner asked for, as far as anybody can tell."""

from __future__ import annotations

from math import inf

from stretto.core.job import Communication
from stretto.models.noise import GradientNoise
from stretto.policies.base import JobView
from stretto.policies.common import requested_batch
from stretto.policies.gangs import EmptyCluster, requested_gang

MAX_EPOCHS = 1000
"""How far a convergence is looked for."""


def remaining_s(job: JobView, empty: EmptyCluster) -> float | None:
    """Time to the job's end at its requested size on the fewest nodes of the empty cluster.

    None while nothing is believed that could tell, and for a job that does not fit.
    """
    units, units_per_s = _remaining_units(job), _believed_units_per_s(job, empty)
    if units is None or units_per_s is None:
        return None
    return units / units_per_s if units_per_s > 0 else inf


def _remaining_units(job: JobView) -> float | None:
    work = job.job.work
    total = work.total_units
    if total is None:
        convergence = job.belief.convergence
        if convergence is None or work.convergence is None:
            return None
        total = convergence.epochs_to_converge(work.convergence, MAX_EPOCHS).expected * work.units_per_epoch
    return max(total - job.work_done, 0.0)


def _believed_units_per_s(job: JobView, empty: EmptyCluster) -> float | None:
    workers, servers = gang = requested_gang(job.job)
    batch = requested_batch(job.job, workers)
    if job.job.communication is not Communication.ALL_REDUCE:
        server_speed = job.belief.server_speed
        if server_speed is None:
            return None
        steps_per_s = float(server_speed.steps_per_s(servers, workers))
    else:
        speed = job.belief.speed
        place = None if speed is None else empty.place(job.job, gang)
        if speed is None or place is None:
            return None
        steps_per_s = 1.0 / float(speed.step_s(len(place.nodes), workers, batch.atomic, batch.accumulation))
    noise = GradientNoise(job.belief.noise.sqr, job.belief.noise.var, job.job.batch.initial)
    return steps_per_s * float(noise.gain(batch.total(workers)))
