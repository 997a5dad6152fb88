"""What a probe is asked, the copies of the training it looks at, and what it has seen of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stretto.core.allocation import Allocation, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import last_line
from stretto.core.events import JobFailed, JobReported
from stretto.core.job import BatchLimits, Job, Tier
from stretto.inputs.profile import FailedConfig, MeasuredProfile, TimedEpoch, fit_speed
from stretto.models.belief import Observations
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
    shows_epochs_only: bool = False
    """The first that is heard of it may be the end of its first epoch, as of a command."""
    steps_suffice: bool = False
    """Nobody asks how long an epoch takes, once steps were timed."""


@dataclass(frozen=True, slots=True)
class ProbeProgress:
    """What the probe is doing, for a display."""

    now_s: float
    time_s: float
    doing: str
    since: str = ""
    """When `time_s` begins to count, in words; empty: with what is being done."""


OnProgress = Callable[[ProbeProgress], None]
Describe = Callable[[str], Described | None]
Imported = Callable[[str], bool]
"""Whether the training code of a job was imported, and its function runs."""


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
    untimed: bool = False
    """The end of its first epoch was seen since the last start, but not its beginning."""

    def begin(self, workers: int, started_as: str, *, lone: bool = False) -> None:
        self.workers, self.started_as, self.lone = workers, started_as, lone
        self.ready, self.first, self.untimed = False, True, False
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


@dataclass(frozen=True, slots=True)
class Started:
    """How long a start took until the first that was heard of it."""

    took_s: float
    epoch: TimedEpoch | None
    """If that was the end of its first epoch: both together, as if they were an epoch."""


class Measurements:
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
        self.started: dict[str, list[Started]] = {}
        """By what a copy was started as."""
        self.failed: dict[int, JobFailed] = {}
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
        copy.untimed = copy.untimed or any(result.epoch_s is None for result in event.results)
        if event.resize_s is not None:
            copy.ready = True
            with_epoch = self._spec.shows_epochs_only and copy.untimed
            epoch = copy.timed(event.resize_s, first=True) if with_epoch else None
            self.started.setdefault(copy.started_as, []).append(Started(event.resize_s, epoch))
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
        if (guessed := _by_part(copy)) is not None:
            self.guessed.append(guessed)

    def tells_epochs(self, copies: Iterable[Copy]) -> bool:
        """Whether an epoch or step was timed, or a part that says as much."""
        counted = self.described is not None and self.described.examples is not None
        by_steps = bool(self.speeds) and (counted or self._spec.steps_suffice)
        return bool(self.epochs or self.guessed or by_steps) or any(map(_by_part, copies))

    def _starts_s(self, kind: str) -> tuple[float, ...]:
        """Without the first epoch, where that was seen to end only."""
        return tuple(
            one.took_s if one.epoch is None else max(one.took_s - self._usual_epoch_s(one.epoch), 0.0)
            for one in self.started.get(kind, ())
        )

    def _usual_epoch_s(self, like: TimedEpoch) -> float:
        """Between reports: of the same configuration and workers, else of all; else all of it is epoch."""
        same = [
            one.epoch_s for one in self.epochs if (one.config, one.workers) == (like.config, like.workers)
        ]
        times_s = same or [one.epoch_s for one in self.epochs if one.workers == like.workers]
        return median(times_s) if times_s else like.epoch_s

    def _missing_epochs(self, guessed: Sequence[TimedEpoch]) -> Iterator[str]:
        lone = any(one.lone for one in self.epochs)
        for workers in (1, *worker_counts(self._most)):
            named = f"{workers} worker{'s' if workers > 1 else ''}"
            if not any(one.workers == workers and not one.lone for one in self.epochs):
                beside = " beside others" if workers == 1 and lone else ""
                yield f"whole epochs with {named}{beside}"
            if any(one.workers == workers and not one.lone and not one.first for one in guessed):
                yield f"what an epoch with {named} does after its last step"
        if any(one.first for one in guessed):
            yield "an epoch without the start before it"

    def _missing(self, guessed: Sequence[TimedEpoch]) -> Iterator[str]:
        yield from self._missing_epochs(guessed)
        count = len(self._spec.configs)
        timed = {one.config for one in self.epochs if one.workers == 1}
        if count > 1 and len(timed) < count:
            yield f"{count - len(timed)} of {count} configurations"
        if count == 1:
            yield "how much configurations differ"
        if not self.started.get("start"):
            yield "a start with the training code loaded"
        if self._most > 1 and self._spec.tier is not Tier.RIGID and not self.started.get("resize"):
            yield "a resize"
        if self._most > 1 and not any(one.lone for one in self.epochs):
            yield "a worker with the machine to itself"

    def _failures(self) -> Iterator[FailedConfig]:
        for config, failed in self.failed.items():
            yield FailedConfig(config=config, error=last_line(failed.error), log=failed.log)

    def _guessed(self) -> list[TimedEpoch]:
        """Of what was not timed whole: by a part; if nothing at all was, with the start before it."""
        whole = {(one.config, one.workers, one.lone) for one in self.epochs}
        parts = [one for one in self.guessed if (one.config, one.workers, one.lone) not in whole]
        if whole or parts:
            return parts
        return [one.epoch for kind in self.started.values() for one in kind if one.epoch is not None]

    def profile(self, *, slots: int, measured_s: float, given_s: float, cut_short: bool) -> MeasuredProfile:
        """All that was seen, the model fitted to it, and what is missing."""
        guessed = self._guessed()
        speeds = max((tuple(one.speeds.values()) for one in self.speeds.values()), key=len, default=())
        return MeasuredProfile(
            what=self._spec.what,
            slots=slots,
            measured_s=measured_s,
            configs=tuple(dict(config) for config in self._spec.configs),
            epochs=(*self.epochs, *guessed),
            speeds=speeds,
            warm_up_s=next(iter(self._starts_s("warm-up")), None),
            starts_s=self._starts_s("start"),
            lone_starts_s=self._starts_s("lone start"),
            gang_starts_s=self._starts_s("gang start"),
            resizes_s=self._starts_s("resize"),
            examples=None if self.described is None else self.described.examples,
            speed=fit_speed(speeds),
            not_measured=tuple(self._missing(guessed)),
            given_s=given_s,
            cut_short=cut_short,
            most_workers=self._most if self._most < slots else None,
            failed=tuple(self._failures()),
        )


def _by_part(copy: Copy) -> TimedEpoch | None:
    """How long a whole epoch would take at the pace of the present one; None: too little of it was seen."""
    if copy.since is None or copy.latest is None:
        return None
    part = copy.latest[1] - copy.since[1]
    if part < LEAST_PROGRESS:
        return None
    return copy.timed((copy.latest[0] - copy.since[0]) / part, first=False)


def worker_counts(most: int) -> Iterator[int]:
    """2, 4, 8, .. and the most."""
    workers = 2
    while workers < most:
        yield workers
        workers *= 2
    if most > 1:
        yield most


PROBE_S = 90.0
"""The longest that a probe takes, once it trains and an epoch has ended."""


PROBE_SHARE = 1 / 8
"""Of the time until the deadline, at most so much goes to a probe."""


FIRST_EPOCH_S = 600.0
"""Without a deadline, so long the end of a first epoch is waited for."""


LOADING_S = 300.0
"""Training that shows nothing for so long is not waited for; its time is not the probe's."""


LOADING_SHARE = 3 / 4
"""Of the time until the deadline, at most so much goes to waiting for a first sign of training: the run must
load the training code once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTime:
    """What a probe may take."""

    usual_s: float
    """Once it trains."""
    first_epoch_s: float
    """From its start, if no epoch and no step was timed before."""
    loading_s: float = LOADING_S
    """From its start, until anything is heard of it."""


def probe_time(deadline_s: float | None) -> ProbeTime:
    """For a study that has so long until its deadline."""
    if deadline_s is None:
        return ProbeTime(usual_s=PROBE_S, first_epoch_s=FIRST_EPOCH_S)
    share_s = deadline_s * PROBE_SHARE
    return ProbeTime(
        usual_s=min(PROBE_S, share_s),
        first_epoch_s=share_s,
        loading_s=min(LOADING_S, deadline_s * LOADING_SHARE),
    )


class SlotMap:
    """Who holds how many slots of which node; nobody asks for more than there are."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._free = {node.id: node.gpus for node in nodes}
        self._held: dict[str, dict[str, int]] = {}

    def place(self, job_id: str, workers: int) -> Allocation:
        """So many workers from now on: those that are there stay, others come beside them if they can."""
        before = self._held.get(job_id, {})
        self.clear(job_id)
        kept: dict[str, int] = {}
        for node, count in before.items():
            kept[node] = min(count, workers - sum(kept.values()))
        self._take(kept)
        while (missing := workers - sum(kept.values())) > 0:
            node = self._roomiest([node for node in kept if self._free[node]] or self._free)
            taken = min(missing, self._free[node])
            if not taken:
                raise ValueError(f"{job_id} wants {missing} slots more than there are")
            kept[node] = kept.get(node, 0) + taken
            self._take({node: taken})
        self._held[job_id] = {node: count for node, count in kept.items() if count}
        return on_nodes(self._held[job_id])

    def clear(self, job_id: str) -> None:
        """It holds nothing any more."""
        for node, count in self._held.pop(job_id, {}).items():
            self._free[node] += count

    def _roomiest(self, nodes: Iterable[str]) -> str:
        return max(nodes, key=lambda node: self._free[node])

    def _take(self, counts: dict[str, int]) -> None:
        for node, count in counts.items():
            self._free[node] -= count
