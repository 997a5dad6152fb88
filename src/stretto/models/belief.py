"""What is believed about one job: models fitted to everything observed of it so far, when a decision asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from stretto.core.job import Communication, Job
from stretto.core.observations import LossPoint, NoiseSample, SpeedSample
from stretto.models.convergence import ConvergenceFit, fit_convergence
from stretto.models.noise import PERFECTLY_SCALABLE
from stretto.models.parameter_server import ServerSpeedFit, fit_server_speed
from stretto.models.resize import DEFAULT_RESIZE_S, ResizeCost, TimesSeen, expected_resize_cost
from stretto.models.speed import AllReduceSpeed, fit_all_reduce

Configuration = tuple[int, int, int, int]
"""(nodes, workers, servers, atomic batch): what a step time belongs to."""

NEWS = 0.01
"""A mean that moved by this share since it was last news, is news."""


@dataclass(slots=True)
class Observations:
    """The fold of a job's reports. One mean per configuration: a configuration seen often counts once."""

    speeds: dict[Configuration, SpeedSample] = field(default_factory=dict)
    noise: NoiseSample | None = None
    first_noise: NoiseSample | None = None
    """Gradient statistics at the beginning, which say more about another job's beginning."""
    losses: list[LossPoint] = field(default_factory=list)
    resizes: TimesSeen = field(default_factory=TimesSeen)
    max_workers_seen: int = 0
    news: tuple[SpeedSample, ...] = ()
    """The speeds as they were when they last said something new: what models are fitted to.

    A new object each time, so that a fit is out of date exactly when this is another one; and
    a fit depends on what was observed only, not on when somebody asked for it.
    """
    _times_seen: dict[Configuration, int] = field(default_factory=dict)
    _news_s: dict[Configuration, float] = field(default_factory=dict)

    def set_noise(self, noise: NoiseSample) -> None:
        self.noise = noise
        self.first_noise = self.first_noise or noise

    def add_speed(self, sample: SpeedSample) -> None:
        key = (sample.nodes, sample.workers, sample.servers, sample.atomic)
        seen = self._times_seen.get(key, 0) + 1
        if seen > 1:
            old = self.speeds[key]
            sample = SpeedSample(
                *key,
                step_s=old.step_s + (sample.step_s - old.step_s) / seen,
                sync_s=old.sync_s + (sample.sync_s - old.sync_s) / seen,
            )
        self.speeds[key] = sample
        self._times_seen[key] = seen
        self.max_workers_seen = max(self.max_workers_seen, sample.workers)
        news_s = self._news_s.get(key)
        if news_s is None or abs(sample.step_s - news_s) > NEWS * news_s:
            self._news_s[key] = sample.step_s
            self.news = tuple(self.speeds.values())


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
