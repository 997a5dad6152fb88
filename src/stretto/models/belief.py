"""The belief about one job: models that are fitted to all its observations when a decision needs them."""

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
"""(nodes, workers, servers, atomic batch): what a step time depends on."""

NEWS = 0.01
"""Models are fitted again when a mean has moved by this share."""


@dataclass(slots=True)
class Observations:
    """A job's reports in summary: one mean step time per configuration, however often it was seen."""

    speeds: dict[Configuration, SpeedSample] = field(default_factory=dict)
    noise: NoiseSample | None = None
    first_noise: NoiseSample | None = None
    """The first gradient statistics, which say most about the beginning of another job."""
    losses: list[LossPoint] = field(default_factory=list)
    resizes: TimesSeen = field(default_factory=TimesSeen)
    max_workers_seen: int = 0
    news: tuple[SpeedSample, ...] = ()
    """The speeds when a mean last moved by more than `NEWS`; models are fitted to these.

    It is a new object each time, so a fit is out of date exactly if this is another object. So a fit depends
    only on what was observed, not on when it was requested.
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
    """The models that a policy may use. None means that there are no observations to fit."""

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
    """Models that are given, as in a snapshot for `stretto decide`."""

    speed: AllReduceSpeed | None = None
    server_speed: ServerSpeedFit | None = None
    noise: NoiseSample = PERFECTLY_SCALABLE
    convergence: ConvergenceFit | None = None
    resize: ResizeCost
    max_workers_seen: int = 0


class FittedBelief:
    """Models fitted lazily to the observations of a job, or before it has any, of its application.

    `prior`: observations of finished jobs of the same application; the job's own replace them once there are
    any. `resize_s`: the assumed time of a start or resize before any was seen.
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
