"""What can be trained in a simulation: limits and truth of each application, and how a job is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.core.errors import InputError, did_you_mean
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.worlds.truth import Truth

MOST_WORKERS = 64
"""No application was measured with more GPUs."""


class Configuration(NamedTuple):
    """A number of GPUs and the total batch size on them."""

    workers: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """One kind of training run."""

    name: str
    truth: Truth
    initial_batch: int
    max_batch: int
    per_gpu_min: int
    per_gpu_max: int
    tier: Tier = Tier.ADAPTIVE
    max_workers: int = MOST_WORKERS
    """Beyond these a scheduler must not go, though a rigid job may ask for more."""
    tuned: tuple[Configuration, ...] = ()
    """Well-chosen requests: each uses its GPUs at 50 to 80 % of the efficiency of one."""

    def job(self, job_id: str, submit_s: float, request: Configuration, *, where: str = "") -> Job:
        """A job that asks for `request`; refuses what the application cannot be trained with."""
        self._check(request, where)
        limit = min(self.max_workers, self._workers_limit)
        return Job(
            id=job_id,
            application=self.name,
            submit_s=submit_s,
            tier=self.tier,
            worker=Role(
                demand=Resources(gpu=1),
                requested=request.workers,
                min=1,
                max=max(limit, request.workers) if self.tier is Tier.RIGID else limit,
            ),
            batch=BatchLimits(
                initial=self.initial_batch,
                requested=request.batch,
                max=self.max_batch,
                per_gpu_min=self.per_gpu_min,
                per_gpu_max=self.per_gpu_max,
            ),
            work=Work(
                units_per_epoch=self.truth.units_at(self.truth.epochs) / self.truth.epochs,
                epochs=self.truth.epochs,
            ),
        )

    @property
    def _workers_limit(self) -> int:
        return min(MOST_WORKERS, self.max_batch // self.per_gpu_min)

    def _check(self, request: Configuration, where: str) -> None:
        if not 1 <= request.workers <= self._workers_limit:
            raise InputError(
                f"{request.workers} replicas of {self.name}; it can use 1 to {self._workers_limit}.",
                where=where,
                remedy="Give a number in this range.",
            )
        if not self.initial_batch <= request.batch <= self.max_batch:
            raise InputError(
                f"batch size {request.batch} of {self.name} is outside the known "
                f"{self.initial_batch}..{self.max_batch}.",
                where=where,
                remedy="Give a total batch size in this range.",
            )
        if request.batch < request.workers * self.per_gpu_min:
            raise InputError(
                f"batch size {request.batch} over {request.workers} replicas of {self.name} leaves less than "
                f"{self.per_gpu_min} examples for each, the fewest one GPU can take.",
                where=where,
                remedy="Give a larger batch size or fewer replicas.",
            )


@dataclass(frozen=True, slots=True)
class Applications:
    """Applications by name."""

    source: str
    """Where they come from, for messages."""
    entries: Mapping[str, Application]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Applications that were found but cannot be used, and why."""

    def get(self, name: str, *, where: str = "") -> Application:
        """The application, or an error that says which there are."""
        found = self.entries.get(name)
        if found is not None:
            return found
        if name in self.left_out:
            raise InputError(
                f"application {name!r} cannot be used: {self.left_out[name]}.",
                where=where,
                remedy="Add the missing file or take the job out.",
            )
        raise InputError(
            f"unknown application {_short(name)}; {self.source} has {', '.join(sorted(self.entries))}.",
            where=where,
            remedy=f"{did_you_mean(name, self.entries)}Use one of these, or give a folder with its profile.",
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
