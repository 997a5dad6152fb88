"""Optimus' estimates for one job: its remaining work, and its remaining time by counts of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from stretto.allocate.free import SLACK, FreeCapacity
from stretto.allocate.marginal import RemainingTime
from stretto.core.job import Communication, Job
from stretto.models.noise import step_gain
from stretto.models.parameter_server import ServerSpeed, ServerSpeedFit
from stretto.models.speed import AllReduceSpeed
from stretto.policies.base import JobView
from stretto.policies.common import MAX_EPOCHS, requested_batch


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """Statistical units left, and a text that says where the number comes from."""

    units: float
    text: str
    estimated: bool
    """Whether it is an estimate of convergence; False if the owner gave a number of epochs."""


def remaining_work(job: JobView, assumed_epochs: int) -> RemainingWork:
    """By the owner's number of epochs; else by convergence of the loss curve; else `assumed_epochs` more."""
    work = job.job.work
    if work.total_units is not None:
        units = max(work.total_units - job.work_done, 0.0)
        return RemainingWork(units, f"{units / work.units_per_epoch:.1f} epochs left", estimated=False)
    fit = job.belief.convergence
    if fit is None or work.convergence is None:
        text = f"no loss curve yet, {assumed_epochs} epochs left assumed"
        return RemainingWork(assumed_epochs * work.units_per_epoch, text, estimated=True)
    epochs = fit.epochs_to_converge(work.convergence, MAX_EPOCHS)
    done = job.work_done / work.units_per_epoch
    # The job is not over, so its current epoch remains even if the curve has converged.
    left = max(float(epochs.expected), job.epoch + 1.0) - done
    low, high = max(epochs.low, job.epoch + 1), max(epochs.high, job.epoch + 1)
    text = f"{left:.1f} epochs left by its loss curve, which ends at {low} to {high}"
    return RemainingWork(left * work.units_per_epoch, text, estimated=True)


def uses_servers(job: Job) -> bool:
    return job.communication is not Communication.ALL_REDUCE


def modelled_speed(fit: ServerSpeedFit | None, remembered: Sequence[float] | None) -> ServerSpeedFit | None:
    """The fit, with the last identified model in its place if it is not identified.

    A job that started with the fit of earlier jobs of its application has few samples of its own at first.
    """
    if fit is None or fit.identified or not remembered:
        return fit
    model = replace(fit.model, thetas=tuple(remembered))
    return replace(fit, model=model, identified=True, warning="")


def remaining_s_with_servers(job: JobView, units: float, fit: ServerSpeedFit) -> RemainingTime:
    """Q / (f gain), with measured f for counts that were run. Plain floats, since it is called very often."""
    steps = units / _gain(job, job.job.batch.requested)
    step_s = _step_s(fit.model)
    measured = fit.measured

    def remaining_s(workers: int, servers: int) -> float:
        seen = measured.get((servers, workers))
        return steps * step_s(workers, servers) if seen is None else steps / seen

    return remaining_s


def _step_s(model: ServerSpeed) -> Callable[[int, int], float]:
    """1 / f of the model, as a function of (workers, servers)."""
    if model.synchronous:
        of_batch, constant, per_ratio, per_worker, per_server = model.thetas
        batch = model.total_batch

        def synchronous_s(w: int, p: int) -> float:
            return of_batch * batch / w + constant + per_ratio * w / p + per_worker * w + per_server * p

        return synchronous_s
    constant, per_ratio, per_worker, per_server = model.thetas

    def asynchronous_s(w: int, p: int) -> float:
        return (constant + per_ratio * w / p + per_worker * w + per_server * p) / w

    return asynchronous_s


def remaining_s_all_reduce(
    job: JobView, units: float, speed: AllReduceSpeed, nodes_for: Sequence[int]
) -> RemainingTime:
    """Remaining time at the requested total batch, with w workers on `nodes_for[w]` nodes."""

    @cache
    def remaining_s(workers: int, servers: int) -> float:
        del servers
        batch = requested_batch(job.job, workers)
        step_s = float(speed.step_s(nodes_for[workers], workers, batch.atomic, batch.accumulation))
        return units * step_s / _gain(job, batch.total(workers))

    return remaining_s


def fewest_nodes(job: Job, nodes: FreeCapacity) -> list[int]:
    """The fewest nodes that hold 0, 1, 2, .. workers, up to the limit of the cluster or the job."""
    demand = np.array(job.worker.demand.amounts())
    needed = demand > 0
    room = ((nodes.capacity[:, needed] + SLACK) / demand[needed]).min(axis=1, initial=job.worker.max)
    held = np.cumsum(np.sort(np.floor(room))[::-1])
    most = min(int(held[-1]) if held.size else 0, job.worker.max)
    return [0, *(np.searchsorted(held, np.arange(1, most + 1)) + 1).tolist()]


def _gain(job: JobView, total_batch: int) -> float:
    return step_gain(job.belief.noise, job.job.batch.initial, total_batch)
