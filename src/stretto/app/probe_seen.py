"""What a probe is asked, the copies of the training it looks at, and what it has seen of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stretto.app.profile_file import MeasuredProfile, TimedEpoch, fit_speed
from stretto.core.events import JobReported
from stretto.core.job import BatchLimits, Job, Tier
from stretto.models.observations import Observations
from stretto.search.space import Config
from stretto.wire.messages import Described

LEAST_PROGRESS = 0.02
"""Of an epoch: less says nothing about how long a whole one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """What to probe."""

    what: str
    """The entry or command, as people wrote it."""
    configs: tuple[Config, ...] = ((),)
    """Hyperparameters to try; several show how much trials differ."""
    tier: Tier = Tier.ELASTIC
    """RIGID: a number of workers is tried by a new start, not by a resize."""
    max_workers: int | None = None
    """Of one gang; None: as many as there are slots."""
    epochs: int | None = None
    """Train no further than this."""
    batch: BatchLimits | None = None
    """Of a training whose batch may change; None: as the training code says."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the probe is doing, for a display."""

    now_s: float
    time_s: float
    doing: str


OnProgress = Callable[[Progress], None]
Describe = Callable[[str], Described | None]


@dataclass(slots=True)
class Copy:
    """One job of the probe, and what is being measured of it."""

    job: Job
    config: int
    workers: int
    started_as: str
    """"warm-up", "start", "lone start", "gang start" or "resize": what its next report tells the time of."""
    ready: bool = False
    first: bool = True
    """No epoch has ended since the last start or resize."""
    since: tuple[float, float] | None = None
    """Time and progress at the first report since then .."""
    latest: tuple[float, float] | None = None
    """.. and at the last one."""
    ended_s: float | None = None
    """When its last epoch ended, of those since then."""
    lone: bool = False
    """The other slots are idle."""
    heard: bool = False
    """It reported something, ever."""

    def begin(self, workers: int, started_as: str, *, lone: bool = False) -> None:
        self.workers, self.started_as, self.lone = workers, started_as, lone
        self.ready, self.first = False, True
        self.since = self.latest = None
        self.ended_s = None

    def get_company(self) -> None:
        """The other slots are taken from now on; the present epoch is neither the one thing nor the other."""
        self.lone, self.first = False, True
        self.since = self.latest = None
        self.ended_s = None

    def timed(self, epoch_s: float, *, first: bool) -> TimedEpoch:
        return TimedEpoch(
            config=self.config, workers=self.workers, epoch_s=epoch_s, first=first, lone=self.lone
        )


class Seen:
    """What was measured so far."""

    def __init__(self, spec: ProbeSpec, most: int, describe: Describe) -> None:
        self._spec = spec
        self._most = most
        self._describe = describe
        self.described: Described | None = None
        self.epochs: list[TimedEpoch] = []
        self.guessed: list[TimedEpoch] = []
        """From a part of an epoch."""
        self.speeds: dict[int, Observations] = {}
        """By configuration: the steps of two are not alike."""
        self.times_s: dict[str, list[float]] = {"warm-up": [], "start": [], "resize": []}
        self.failed: dict[int, str] = {}
        """Configurations whose training failed, and how."""

    def times_of(self, config: int, workers: int, *, lone: bool = False) -> list[float]:
        """Whole epochs of the configuration with so many workers."""
        wanted = (config, workers, lone)
        return [one.epoch_s for one in self.epochs if (one.config, one.workers, one.lone) == wanted]

    def has_step(self, workers: int, atomic: int) -> bool:
        """Whether a step of this kind was timed."""
        samples = (one for seen in self.speeds.values() for one in seen.speeds.values())
        return any((one.workers, one.atomic) == (workers, atomic) for one in samples)

    def batch_limits(self) -> BatchLimits | None:
        """What the training code says of its batch; None if that does not change."""
        known = self.described
        if known is None or not known.adaptive:
            return None
        return BatchLimits(
            initial=known.batch,
            requested=known.batch,
            max=known.max_batch,
            per_gpu_min=known.per_worker_min,
            per_gpu_max=known.per_worker_max,
            accumulation=known.accumulation,
        )

    def take(self, event: JobReported, copy: Copy) -> None:
        """What a report of a copy shows."""
        copy.heard = True
        self.described = self.described or self._describe(copy.job.id)
        if event.resize_s is not None:
            copy.ready = True
            self.times_s.setdefault(copy.started_as, []).append(event.resize_s)
        for sample in event.speeds:
            self.speeds.setdefault(copy.config, Observations()).add_speed(sample)
        for result in event.results:
            if result.epoch_s is not None and result.workers == copy.workers:
                self.epochs.append(copy.timed(self._whole_s(event, copy) or result.epoch_s, first=copy.first))
            copy.first = False
        if event.results:
            copy.ended_s = event.t_s
        copy.latest = (event.t_s, event.work_done)
        copy.since = copy.since or copy.latest

    def _whole_s(self, event: JobReported, copy: Copy) -> float | None:
        """From one epoch's end to the next: with saving, reporting and waiting for a decision."""
        if copy.ended_s is None or len(event.results) > 1:
            return None
        return event.t_s - copy.ended_s

    def note_part(self, copy: Copy) -> None:
        """Of an epoch that did not end in time: how long the whole would take at this pace."""
        if copy.since is None or copy.latest is None:
            return
        part = copy.latest[1] - copy.since[1]
        if part >= LEAST_PROGRESS:
            epoch_s = (copy.latest[0] - copy.since[0]) / part
            self.guessed.append(copy.timed(epoch_s, first=False))

    def _missing(self, guessed: Sequence[TimedEpoch]) -> Iterator[str]:
        for workers in (1, *worker_counts(self._most)):
            named = f"{workers} worker{'s' if workers > 1 else ''}"
            if not any(one.workers == workers and not one.lone for one in self.epochs):
                yield f"whole epochs with {named}"
            if any(one.workers == workers and not one.lone for one in guessed):
                yield f"what an epoch with {named} does after its last step"
        untimed = sum(not self.times_of(config, 1) for config in range(len(self._spec.configs)))
        if untimed and len(self._spec.configs) > 1:
            yield f"{untimed} of {len(self._spec.configs)} configurations"
        if len(self._spec.configs) == 1:
            yield "how much configurations differ"
        if not self.times_s["start"]:
            yield "a start with the training code loaded"
        if self._most > 1 and self._spec.tier is not Tier.RIGID and not self.times_s["resize"]:
            yield "a resize"
        if self._most > 1 and not any(one.lone for one in self.epochs):
            yield "a worker with the machine to itself"
        for config, error in self.failed.items():
            yield f"configuration {config}, which failed: {error.strip().splitlines()[-1]}"

    def profile(self, *, slots: int, measured_s: float) -> MeasuredProfile:
        """All that was seen, the model fitted to it, and what is missing."""
        whole = {(one.config, one.workers, one.lone) for one in self.epochs}
        guessed = [one for one in self.guessed if (one.config, one.workers, one.lone) not in whole]
        speeds = max((tuple(one.speeds.values()) for one in self.speeds.values()), key=len, default=())
        return MeasuredProfile(
            what=self._spec.what,
            slots=slots,
            measured_s=measured_s,
            configs=tuple(dict(config) for config in self._spec.configs),
            epochs=(*self.epochs, *guessed),
            speeds=speeds,
            warm_up_s=next(iter(self.times_s["warm-up"]), None),
            starts_s=tuple(self.times_s["start"]),
            lone_starts_s=tuple(self.times_s.get("lone start", ())),
            gang_starts_s=tuple(self.times_s.get("gang start", ())),
            resizes_s=tuple(self.times_s["resize"]),
            examples=None if self.described is None else self.described.examples,
            speed=fit_speed(speeds),
            not_measured=tuple(self._missing(guessed)),
        )


def worker_counts(most: int) -> Iterator[int]:
    """2, 4, 8, .. and the most."""
    workers = 2
    while workers < most:
        yield workers
        workers *= 2
    if most > 1:
        yield most
