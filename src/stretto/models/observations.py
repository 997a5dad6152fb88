"""Everything seen of one job so far, condensed."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.core.observations import LossPoint, NoiseSample, SpeedSample
from stretto.models.resize import TimesSeen

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
