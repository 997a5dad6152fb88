"""The data of a probe: its specification, the copies of a training, and their measurements."""

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

PROBE_S = 90.0
"""The longest that a probe takes, once it trains and an epoch has ended."""
PROBE_SHARE = 1 / 8
"""The most of the time until the deadline that goes to a probe."""
FIRST_EPOCH_S = 600.0
"""The longest wait for the end of a first epoch without a deadline."""
LOADING_S = 300.0
"""The longest wait for a first sign of training; this time does not count as the probe's."""
LOADING_SHARE = 3 / 4
"""The most of the time until the deadline that is spent waiting for a first sign of training: the run must
load the training code once more."""
LEAST_PROGRESS = 0.02
"""The least part of an epoch from which the length of a whole one is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """What to probe."""

    what: str
    """The entry or command, as the user wrote it."""
    configs: tuple[Config, ...] = ((),)
    """Hyperparameters to try; several show how much trials differ."""
    tier: Tier = Tier.ELASTIC
    """RIGID: other numbers of workers are tried by new starts, not by resizes."""
    max_workers: int | None = None
    """Workers of one gang; None: all slots."""
    epochs: int | None = None
    """The most epochs to train."""
    batch: BatchLimits | None = None
    """The limits of a batch that may change; None: as the training code says."""
    shows_epochs_only: bool = False
    """Its first report may be the end of its first epoch, as with a command."""
    steps_suffice: bool = False
    """Timed steps are enough; the length of an epoch is not needed."""


@dataclass(frozen=True, slots=True)
class ProbeProgress:
    """What the probe is doing now, for a display."""

    now_s: float
    time_s: float
    doing: str
    since: str = ""
    """From when `time_s` counts, in words; empty: from the start of this activity."""


OnProgress = Callable[[ProbeProgress], None]
Describe = Callable[[str], Described | None]
Imported = Callable[[str], bool]
"""Whether the training code of a job is imported and its function runs."""


@dataclass(slots=True)
class Copy:
    """One job of the probe and its present measurement."""

    job: Job
    config: int
    workers: int
    started_as: str
    """"warm-up", "start", "lone start", "gang start" or "resize": what its next report times."""
    ready: bool = False
    first: bool = True
    """Whether no epoch has ended since the last start or resize."""
    since: tuple[float, float] | None = None
    """Time and progress at the first report since the last start or resize .."""
    latest: tuple[float, float] | None = None
    """.. and at the last report."""
    ended_s: float | None = None
    """When its last epoch ended, since the last start or resize."""
    lone: bool = False
    """Whether the other slots are idle."""
    heard: bool = False
    """Whether it has ever reported."""
    untimed: bool = False
    """Whether only the end of its first epoch was seen since the last start, not the beginning."""

    def begin(self, workers: int, started_as: str, *, lone: bool = False) -> None:
        self.workers, self.started_as, self.lone = workers, started_as, lone
        self.ready, self.first, self.untimed = False, True, False
        self.since = self.latest = None
        self.ended_s = None

    def get_company(self) -> None:
        """The other slots are busy from now on. The current epoch counts neither as lone nor as busy."""
        self.lone, self.first = False, True
        self.since = self.latest = None
        self.ended_s = None

    def timed(self, epoch_s: float, *, first: bool) -> TimedEpoch:
        return TimedEpoch(
            config=self.config, workers=self.workers, epoch_s=epoch_s, first=first, lone=self.lone
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The time from a start to the first report."""

    took_s: float
    epoch: TimedEpoch | None
    """If that report ended the first epoch: the time of start and epoch together, as one epoch."""


class Measurements:
    """All measurements so far."""

    def __init__(self, spec: ProbeSpec, most: int, describe: Describe) -> None:
        self._spec = spec
        self._most = most
        self._describe = describe
        self.described: Described | None = None
        self.epochs: list[TimedEpoch] = []
        self.guessed: list[TimedEpoch] = []
        """Epochs that were estimated from a part."""
        self.speeds: dict[int, Observations] = {}
        """By configuration, since their steps differ."""
        self.started: dict[str, list[Started]] = {}
        """By `Copy.started_as`."""
        self.failed: dict[int, JobFailed] = {}
        """The error of each configuration that failed."""

    def times_of(self, config: int, workers: int, *, lone: bool = False) -> list[float]:
        """The times of whole epochs of a configuration with this number of workers."""
        wanted = (config, workers, lone)
        return [one.epoch_s for one in self.epochs if (one.config, one.workers, one.lone) == wanted]

    def has_step(self, workers: int, atomic: int) -> bool:
        """Whether steps with these workers and this batch per worker were timed."""
        samples = (one for seen in self.speeds.values() for one in seen.speeds.values())
        return any((one.workers, one.atomic) == (workers, atomic) for one in samples)

    def batch_limits(self) -> BatchLimits | None:
        """The batch limits of the training code; None if its batch does not change."""
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
        """Adds the measurements of a copy's report."""
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
        """From one epoch's end to the next, with saving, reporting and waiting for a decision."""
        if copy.ended_s is None or len(event.results) > 1:
            return None
        return event.t_s - copy.ended_s

    def note_part(self, copy: Copy) -> None:
        """Notes an estimate for an epoch that did not end in time."""
        if (guessed := _by_part(copy)) is not None:
            self.guessed.append(guessed)

    def tells_epochs(self, copies: Iterable[Copy]) -> bool:
        """Whether the length of an epoch is known: from an epoch, a part of one, or steps."""
        counted = self.described is not None and self.described.examples is not None
        by_steps = bool(self.speeds) and (counted or self._spec.steps_suffice)
        return bool(self.epochs or self.guessed or by_steps) or any(map(_by_part, copies))

    def _starts_s(self, kind: str) -> tuple[float, ...]:
        """The times of starts; if a report includes the first epoch, minus one usual epoch."""
        return tuple(
            one.took_s if one.epoch is None else max(one.took_s - self._usual_epoch_s(one.epoch), 0.0)
            for one in self.started.get(kind, ())
        )

    def _usual_epoch_s(self, like: TimedEpoch) -> float:
        """The median time of an epoch with equal configuration and workers, else of all configurations."""
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
        """Estimates for what was not timed whole; if nothing was timed, first epochs with their starts."""
        whole = {(one.config, one.workers, one.lone) for one in self.epochs}
        parts = [one for one in self.guessed if (one.config, one.workers, one.lone) not in whole]
        if whole or parts:
            return parts
        return [one.epoch for kind in self.started.values() for one in kind if one.epoch is not None]

    def profile(self, *, slots: int, measured_s: float, given_s: float, cut_short: bool) -> MeasuredProfile:
        """The profile: all measurements, the model fitted to them, and what is missing."""
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
    """The length of the present epoch at its pace so far; None: too little was seen."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTime:
    """The time limits of a probe."""

    usual_s: float
    """The limit for measuring, from the first sign of training."""
    first_epoch_s: float
    """The longest wait for an epoch, from the start of the probe, if no epoch or step was timed yet."""
    loading_s: float = LOADING_S
    """The longest wait for a first sign of training, from the start of the probe."""


def probe_time(deadline_s: float | None) -> ProbeTime:
    """The time limits for a study with this much time until its deadline; None: no deadline."""
    if deadline_s is None:
        return ProbeTime(usual_s=PROBE_S, first_epoch_s=FIRST_EPOCH_S)
    share_s = deadline_s * PROBE_SHARE
    return ProbeTime(
        usual_s=min(PROBE_S, share_s),
        first_epoch_s=share_s,
        loading_s=min(LOADING_S, deadline_s * LOADING_SHARE),
    )


class SlotMap:
    """The slots of each node that each job holds."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._free = {node.id: node.gpus for node in nodes}
        self._held: dict[str, dict[str, int]] = {}

    def place(self, job_id: str, workers: int) -> Allocation:
        """Gives a job this many workers: present ones stay, others join them on their nodes if possible."""
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
        """Frees the slots of a job."""
        for node, count in self._held.pop(job_id, {}).items():
            self._free[node] += count

    def _roomiest(self, nodes: Iterable[str]) -> str:
        return max(nodes, key=lambda node: self._free[node])

    def _take(self, counts: dict[str, int]) -> None:
        for node, count in counts.items():
            self._free[node] -= count
