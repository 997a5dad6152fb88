"""Everything seen of one job so far, condensed."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.core.observations import LossPoint, NoiseSample, SpeedSample

Configuration = tuple[int, int, int, int]
"""(nodes, workers, servers, atomic batch): what a step time belongs to."""


@dataclass(slots=True)
class Observations:
    """The fold of a job's reports. One mean per configuration: a configuration seen often counts once."""

    speeds: dict[Configuration, SpeedSample] = field(default_factory=dict)
    _times_seen: dict[Configuration, int] = field(default_factory=dict)
    noise: NoiseSample | None = None
    losses: list[LossPoint] = field(default_factory=list)
    resizes_s: list[float] = field(default_factory=list)
    max_workers_seen: int = 0

    def add_speed(self, sample: SpeedSample) -> None:
        key = (sample.nodes, sample.workers, sample.servers, sample.atomic)
        seen = self._times_seen.get(key, 0)
        if seen:
            old = self.speeds[key]
            share = 1.0 / (seen + 1)
            sample = SpeedSample(
                *key,
                step_s=old.step_s + share * (sample.step_s - old.step_s),
                sync_s=old.sync_s + share * (sample.sync_s - old.sync_s),
            )
        self.speeds[key] = sample
        self._times_seen[key] = seen + 1
        self.max_workers_seen = max(self.max_workers_seen, sample.workers)
