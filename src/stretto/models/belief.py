"""What is believed about one job: models fitted to what was observed of it, when a decision asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stretto.core.job import Communication, Job
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.models.convergence import ConvergenceFit, fit_convergence
from stretto.models.noise import PERFECTLY_SCALABLE
from stretto.models.observations import Observations
from stretto.models.parameter_server import ServerSpeedFit, fit_server_speed
from stretto.models.resize import DEFAULT_RESIZE_S, ResizeCost, expected_resize_cost
from stretto.models.speed import AllReduceSpeed, fit_all_reduce


class Belief(Protocol):
    """The models a policy may consult. None means: nothing was observed that could tell."""

    @property
    def speed(self) -> AllReduceSpeed | None: ...

    @property
    def server_speed(self) -> ServerSpeedFit | None: ...

    @property
    def noise(self) -> NoiseSample: ...

    @property
    def convergence(self) -> ConvergenceFit | None: ...

    @property
    def resize(self) -> ResizeCost: ...

    @property
    def max_workers_seen(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedBelief:
    """Models somebody else fitted, as in a snapshot given to `stretto decide`."""

    speed: AllReduceSpeed | None = None
    server_speed: ServerSpeedFit | None = None
    noise: NoiseSample = PERFECTLY_SCALABLE
    convergence: ConvergenceFit | None = None
    resize: ResizeCost
    max_workers_seen: int = 0


class FittedBelief:
    """Models fitted lazily to the observations of a job, or, before it has any, of its application.

    `prior` holds what finished jobs of the same application showed; the job's own observations
    replace it as soon as there are some. `resize_s` is what a start or resize takes while none was seen.
    """

    def __init__(
        self,
        job: Job,
        observed: Observations,
        prior: Observations | None = None,
        resize_s: float = DEFAULT_RESIZE_S,
    ) -> None:
        self._job = job
        self._observed = observed
        self._prior = prior
        self._resize_s = resize_s
        self._speed: AllReduceSpeed | None = None
        self._speed_of: tuple[SpeedSample, ...] = ()
        self._server_speed: ServerSpeedFit | None = None
        self._server_speed_of: tuple[SpeedSample, ...] = ()
        self._convergence: ConvergenceFit | None = None
        self._convergence_points = 0

    @property
    def speed(self) -> AllReduceSpeed | None:
        news = self._source.news
        if news is not self._speed_of:
            self._speed = fit_all_reduce(news)
            self._speed_of = news
        return self._speed

    @property
    def server_speed(self) -> ServerSpeedFit | None:
        news = self._source.news
        if news is not self._server_speed_of:
            self._server_speed = fit_server_speed(
                news,
                synchronous=self._job.communication is Communication.PS_SYNC,
                total_batch=self._job.batch.requested,
            )
            self._server_speed_of = news
        return self._server_speed

    @property
    def noise(self) -> NoiseSample:
        return self._source.noise or PERFECTLY_SCALABLE

    @property
    def convergence(self) -> ConvergenceFit | None:
        losses = self._observed.losses
        if len(losses) != self._convergence_points:
            self._convergence = fit_convergence(losses)
            self._convergence_points = len(losses)
        return self._convergence

    @property
    def resize(self) -> ResizeCost:
        prior = self._prior.resizes if self._prior else None
        return expected_resize_cost(self._observed.resizes, prior, self._resize_s)

    @property
    def max_workers_seen(self) -> int:
        return self._source.max_workers_seen

    @property
    def _source(self) -> Observations:
        return self._prior if self._prior and not self._observed.speeds else self._observed
