"""Runs a probe: starts, grows and stops copies of a training, and times them by their reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from stretto.core.allocation import NOTHING, BatchChoice
from stretto.core.errors import InputError
from stretto.core.events import (
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    NodeLost,
    NoteKind,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.core.substrate import Substrate
from stretto.core.units import counted
from stretto.driving.drive import Observer
from stretto.inputs.profile import MeasuredProfile
from stretto.models.batch import split_batch
from stretto.profiling.probe_data import (
    Copy,
    Describe,
    Imported,
    Measurements,
    OnProgress,
    ProbeProgress,
    ProbeSpec,
    ProbeTime,
    SlotMap,
    worker_counts,
)
from stretto.search.source import ANY_BATCH

PROBE = "probe"
NO_BATCH = "the training function has taken no batch of its loader"
EPOCHS_EACH = 3
"""Epochs to time per configuration and number of workers, the first epochs included .."""
SECONDS_EACH = 1.5
""".. and the least time in which to time them: very short epochs vary by chance."""
SILENCE_S = 10.0
"""After this much silence, and whenever it has doubled, a line says what the probe waits for."""
SINGLE_SHARE = 0.5
"""The most of the time that goes to single workers; gangs share the rest."""
AGAIN_SHARE = 0.2
"""The most of the remaining time that goes to further starts."""
LONE_SHARE = 0.15
"""The most of the time that goes to a worker alone on the machine."""
STARTED_AGAIN = 2
"""Copies that are parked and started again: a start from a checkpoint is timed, too."""
LONE_STARTS = 3
"""Starts of the worker that is alone on the machine; the first is slow, as it makes a first checkpoint."""
GANG_CONFIGS = 2
"""Configurations that are timed with several workers: their speed-up differs less than their speed."""
BATCH_SHARE = 0.3
"""The share of the time for other batch sizes, if the batch may change."""
BATCH_FACTORS = (1.0, 0.5, 2.0, 4.0)
"""Batch sizes per worker to try, relative to the usual one, if the batch may change."""


class Probe:
    """Times epochs, starts and resizes of copies of a training.

    First single workers fill all slots, since trials of a study have such neighbours, too; then fewer copies
    get more workers each. What does not fit into the time is left out and named. Only a first epoch is waited
    for longer.
    """

    def __init__(
        self,
        spec: ProbeSpec,
        substrate: Substrate,
        *,
        slots: int,
        slot_map: SlotMap,
        time: ProbeTime,
        describe: Describe,
        imported: Imported | None,
        on_progress: OnProgress,
        observer: Observer,
    ) -> None:
        self._spec = spec
        self._imported = imported
        self._substrate = substrate
        self._slots = slots
        self._slot_map = slot_map
        self._most = min(slots, spec.max_workers or slots)
        self._begun_s = substrate.now_s()
        self._time = time
        self._end_s = self._begun_s + time.usual_s
        self._cut_short = False
        self._saw_an_end = False
        self._has_shown = False
        """Whether any copy has reported."""
        self.noted = ""
        """Notes about the training, each once."""
        self._on_progress = on_progress
        self._observer = observer
        self._numbers = count(1)
        self._names = count()
        self._copies: dict[str, Copy] = {}
        self._measurements = Measurements(spec, self._most, describe)

    def run(self) -> None:
        self._observer.tick(self._now_s())
        self._say("starting one worker")
        self._start(0, 1, "warm-up")
        if not self._shows_itself():
            self._end_s = self._now_s()
            self._first_epoch()
            return
        self._end_s = self._now_s() + self._time.usual_s
        limits = self._spec.batch or self._measurements.batch_limits()
        epochs_end_s = self._end_s - (0.0 if limits is None else BATCH_SHARE * self._left_s())
        if self._slots > 1:
            self._lone_worker(self._share(epochs_end_s, LONE_SHARE))
        self._single_workers(self._share(epochs_end_s, SINGLE_SHARE))
        self._first_epoch()
        self._starts_again(self._share(epochs_end_s, AGAIN_SHARE))
        counts = list(worker_counts(self._most))
        for position, workers in enumerate(counts):
            self._gangs(workers, self._share(epochs_end_s, 1 / (len(counts) - position)))
        if limits is not None:
            self._batch_sizes(limits)

    def result(self) -> MeasuredProfile:
        """The profile of all that was measured."""
        return self._measurements.profile(
            slots=self._slots,
            measured_s=self._now_s() - self._begun_s,
            given_s=self._time.usual_s,
            cut_short=self._cut_short,
        )

    def stop(self) -> None:
        self._drop(list(self._copies.values()))

    def silence(self) -> str:
        """What a silent training may be doing; empty if it has reported."""
        if self._has_shown or not self._copies:
            return ""
        if self._spec.shows_epochs_only:
            return "the command has printed no epoch yet"
        if self._imported is None:
            return ""
        return NO_BATCH if any(map(self._imported, self._copies)) else "the training code is being imported"

    def _shows_itself(self) -> bool:
        """Waits for a first sign of training; whether it came within the time for loading."""

        def heard() -> bool:
            return all(copy.heard for copy in self._copies.values())

        end_s, said_s = self._begun_s + self._time.loading_s, SILENCE_S
        while not heard() and self._now_s() < end_s:
            self._wait(heard, min(end_s, self._begun_s + said_s))
            if not heard() and self._now_s() < end_s:
                doing = self.silence() or "nothing was heard yet"
                self._say(doing, self._time.loading_s, "in all, until it trains")
                said_s *= 2.0
        return heard()

    def _single_workers(self, end_s: float) -> None:
        """Keeps one worker on each slot until every configuration was timed often enough."""
        self._say("timing epochs of single workers")

        def enough() -> bool:
            self._swap_timed()
            self._fill(1)
            return all(self._is_timed(config, 1) for config in self._usable())

        self._until(enough, end_s)

    def _first_epoch(self) -> None:
        """Waits longer for a first epoch if nothing shows yet how long one takes.

        Training that ended without a timed epoch will not show one later.
        """

        def enough() -> bool:
            if self._saw_an_end or self._measurements.tells_epochs(self._copies.values()):
                return True
            self._fill(1)
            return False

        end_s = max(self._end_s, self._begun_s + self._time.first_epoch_s)
        if not enough() and self._has_time(end_s):
            self._say("waiting for the first epoch's end", end_s - self._begun_s, "in all")
            self._until(enough, end_s)

    def _starts_again(self, end_s: float) -> None:
        """Parks copies and starts them again, one at a time, as a study pauses and resumes trials.

        A rigid training may restart from its first epoch, so this is done only if no other start was timed.
        """
        if self._spec.tier is Tier.RIGID and self._measurements.started.get("start"):
            return
        for copy in list(self._copies.values())[:STARTED_AGAIN]:
            if self._has_time(end_s) and copy.job.id in self._copies:
                self._say("timing a start")
                self._start_again(copy, "start", end_s)

    def _lone_worker(self, end_s: float) -> None:
        """Times the first worker while the other slots are idle, since a plan may hold few slots.

        The same worker is timed beside others right after.
        """
        copy = next(iter(self._copies.values()), None)
        if copy is None:
            return
        self._say("timing epochs of one worker alone")
        if self._spec.tier is Tier.RIGID:
            copy.lone = True
        else:
            for _ in range(LONE_STARTS):
                if copy.job.id in self._copies:
                    self._start_again(copy, "lone start", end_s, lone=True)
        self._until(lambda: self._is_timed(copy.config, 1, lone=True) or not self._copies, end_s)
        copy.get_company()

    def _start_again(self, copy: Copy, started_as: str, end_s: float, *, lone: bool = False) -> None:
        self._measurements.note_part(copy)
        self._tell(Action.PARK, copy)
        copy.begin(1, started_as, lone=lone)
        self._tell(Action.START, copy)
        self._until(lambda: copy.ready or copy.job.id not in self._copies, end_s)

    def _gangs(self, workers: int, end_s: float) -> None:
        """Times as many gangs of this size as fit on the slots."""
        if not self._has_time(end_s):
            return
        self._say(f"timing epochs of {workers} workers")
        resizes = self._spec.tier is not Tier.RIGID
        keep = list(self._copies.values())[: self._slots // workers if resizes else 0]
        self._drop([copy for copy in self._copies.values() if copy not in keep])
        for copy in keep:
            self._measurements.note_part(copy)
            copy.begin(workers, "resize")
            self._tell(Action.RESIZE, copy)

        def enough() -> bool:
            timed = [config for config in self._usable() if self._is_timed(config, workers)]
            done = len(timed) >= min(GANG_CONFIGS, len(self._usable()))
            if not done:
                self._drop([copy for copy in self._copies.values() if copy.config in timed])
            self._fill(workers)
            return done

        self._until(enough, end_s)

    def _batch_sizes(self, limits: BatchLimits) -> None:
        """Times steps of other batch sizes per worker, with one worker and with the most."""
        counts = sorted({1, self._most})
        for position, workers in enumerate(counts):
            end_s = self._share(self._end_s, 1 / (len(counts) - position))
            if not self._has_time(end_s):
                return
            self._drop(list(self._copies.values()))
            for _ in range(self._slots // workers):
                self._start(self._usable()[0], workers, limits=limits)
            usual = split_batch(limits, limits.requested, workers).atomic
            highest = min(limits.per_gpu_max, limits.max // workers)
            for atomic in (round(usual * factor) for factor in BATCH_FACTORS):
                if limits.per_gpu_min <= atomic <= highest:
                    self._time_batch(workers, atomic, end_s)

    def _time_batch(self, workers: int, atomic: int, end_s: float) -> None:
        self._say(f"timing steps of {workers * atomic} examples with {counted(workers, 'worker')}")
        for copy in self._copies.values():
            self._tell(Action.SET_BATCH, copy, BatchChoice(atomic))
        self._until(lambda: self._measurements.has_step(workers, atomic) or not self._copies, end_s)

    def _is_timed(self, config: int, workers: int, *, lone: bool = False) -> bool:
        times_s = self._measurements.times_of(config, workers, lone=lone)
        return len(times_s) >= EPOCHS_EACH and sum(times_s) >= SECONDS_EACH

    def _swap_timed(self) -> None:
        """Replaces copies that were timed often enough by configurations that are not being timed.

        They are parked and not stopped: in a study, too, a start waits until another trial is saved.
        """
        timing = {copy.config for copy in self._copies.values()}
        lacking = [
            config for config in self._usable() if config not in timing and not self._is_timed(config, 1)
        ]
        timed = [copy for copy in self._copies.values() if self._is_timed(copy.config, 1)]
        for copy, config in zip(timed, lacking, strict=False):
            self._drop([copy], Action.PARK)
            self._start(config, 1)

    def _fill(self, workers: int) -> None:
        """Fills free slots with gangs of this size, the least timed configurations first."""
        while len(self._copies) < self._slots // workers:
            self._start(min(self._usable(), key=partial(self._urgency, workers)), workers)

    def _urgency(self, workers: int, config: int) -> tuple[int, bool, int]:
        """Sort key of the next configuration to time; a gang is compared with its own single worker."""
        running = sum(copy.config == config for copy in self._copies.values())
        unknown_alone = workers > 1 and not self._measurements.times_of(config, 1)
        return running, unknown_alone, len(self._measurements.times_of(config, workers))

    def _usable(self) -> list[int]:
        """The configurations that have not failed; InputError if all have."""
        usable = [
            config for config in range(len(self._spec.configs)) if config not in self._measurements.failed
        ]
        if not usable:
            first = next(iter(self._measurements.failed.values()))
            raise InputError("the training failed.", where=self._spec.what, remedy=first.error, log=first.log)
        return usable

    def _start(
        self,
        config: int,
        workers: int,
        started_as: str = "",
        limits: BatchLimits | None = None,
    ) -> None:
        """Starts a copy; with `limits` the probe sets its batch."""
        job = Job(
            id=f"probe-{next(self._names):03d}",
            application=self._spec.what,
            submit_s=self._now_s(),
            worker=Role(demand=Resources(gpu=1), min=1, max=self._most),
            tier=self._spec.tier if limits is None else Tier.ADAPTIVE,
            batch=limits or ANY_BATCH,
            work=Work(units_per_epoch=1.0, epochs=self._spec.epochs),
            study=PROBE if limits is None else None,
            config=self._spec.configs[config],
        )
        self._substrate.admit(job)
        kind = started_as or ("start" if workers == 1 else "gang start")
        copy = self._copies[job.id] = Copy(job, config, workers, kind)
        self._tell(Action.START, copy)

    def _drop(self, copies: Sequence[Copy], action: Action = Action.STOP) -> None:
        for copy in copies:
            self._measurements.note_part(copy)
            self._tell(action, copy)
            del self._copies[copy.job.id]

    def _tell(self, action: Action, copy: Copy, batch: BatchChoice | None = None) -> None:
        gone = action in {Action.STOP, Action.PARK}
        if gone:
            self._slot_map.clear(copy.job.id)
        allocation = NOTHING if gone else self._slot_map.place(copy.job.id, copy.workers)
        limits = copy.job.batch
        choice = batch or split_batch(limits, limits.requested, copy.workers)
        number = next(self._numbers)
        self._substrate.apply([Instruction(number, action, copy.job.id, allocation, choice)])

    def _until(self, enough: Callable[[], bool], end_s: float) -> None:
        """Waits, and notes whether the time was too short."""
        self._wait(enough, end_s)
        self._has_time(math.inf if enough() else end_s)

    def _wait(self, enough: Callable[[], bool], end_s: float) -> None:
        """Waits for a condition, which is checked once all events of the same time were processed."""
        while not enough() and self._now_s() < end_s:
            event = self._substrate.next_event(end_s)
            while event is not None:
                self._take(event)
                event = self._substrate.next_event(self._now_s())
            self._observer.tick(self._now_s())

    def _take(self, event: Event) -> None:
        self._observer.observe(event)
        if isinstance(event, NodeLost):
            raise InputError(
                f"node {event.node_id} was lost while speeds were measured.",
                where=self._spec.what,
                remedy="Start again.",
            )
        copy = self._copies.get(event.subject)
        if copy is None:
            return
        match event:
            case JobReported():
                self._has_shown = True
                self._measurements.take(event, copy)
            case JobNoted() if event.about is not NoteKind.NOT_BEGUN:  # the probe says so itself
                self._note(event.text)
            case JobRetried():
                copy.begin(copy.workers, "retry")
            case JobFailed():
                self._measurements.failed[copy.config] = event
                self._forget(copy)
            case JobFinished():
                if not copy.heard:
                    raise InputError(
                        "the training ended without reporting an epoch.",
                        where=self._spec.what,
                        remedy="Call run.report(...) once per epoch; a command prints a line such as "
                        '{"epoch": 1, "accuracy": 0.9}.',
                    )
                self._saw_an_end = True
                self._forget(copy)
            case _:
                pass

    def _note(self, text: str) -> None:
        sentence = f"{text[:1].upper()}{text[1:].rstrip('.')}."
        if sentence not in self.noted:
            self.noted = f"{self.noted} {sentence}".lstrip()

    def _forget(self, copy: Copy) -> None:
        """Removes a copy that ended by itself."""
        self._slot_map.clear(copy.job.id)
        del self._copies[copy.job.id]

    def _now_s(self) -> float:
        return self._substrate.now_s()

    def _share(self, end_s: float, share: float) -> float:
        """The time at which this share of the time until `end_s` is over."""
        return self._now_s() + share * max(end_s - self._now_s(), 0.0)

    def _left_s(self) -> float:
        return max(self._end_s - self._now_s(), 0.0)

    def _has_time(self, end_s: float) -> bool:
        """Whether there is time left; if not, the probe was cut short."""
        has_time = self._now_s() < end_s
        self._cut_short = self._cut_short or not has_time
        return has_time

    def _say(self, doing: str, most_s: float | None = None, since: str = "once it trains") -> None:
        most_s = self._time.usual_s if most_s is None else most_s
        self._on_progress(ProbeProgress(self._now_s() - self._begun_s, most_s, doing, since))
