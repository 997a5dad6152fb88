"""The one thread that runs all gangs, and the bounded queue of their events."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.core.events import Event, JobReported
from stretto.substrate.elastic.effects import Effect, Emit, End, Kill, Moment, Send, Spawn, WorkerExit, Write
from stretto.substrate.elastic.gang import Gang
from stretto.substrate.elastic.workers import Workers
from stretto.system.private_files import private_opener
from stretto.wire.messages import FromWorker

_MOST_REPORTS = 32
"""Reports of one job that may wait in the queue; later ones are merged until the controller catches up."""
_MOST_SPEEDS = 8
"""Samples of step times that a merged report keeps."""


def merged(first: JobReported, second: JobReported) -> JobReported:
    """Two reports of a job as one: the latest progress, and all results and losses of both."""
    return replace(
        second,
        speeds=(*first.speeds, *second.speeds)[-_MOST_SPEEDS:],
        noise=first.noise if second.noise is None else second.noise,
        losses=(*first.losses, *second.losses),
        results=(*first.results, *second.results),
        resize_s=second.resize_s if first.resize_s is None else first.resize_s,
    )


class EventQueue:
    """A queue that merges the reports of a job that has too many there. Not thread-safe."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._reports: Counter[str] = Counter()
        """The number of reports of each job in the queue."""
        self._merged: dict[str, JobReported] = {}
        """Merged reports of jobs that have too many in the queue."""

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Event) -> None:
        if isinstance(event, JobReported):
            before = self._merged.get(event.job_id)
            if before is not None:
                self._merged[event.job_id] = merged(before, event)
            elif self._reports[event.job_id] >= _MOST_REPORTS:
                self._merged[event.job_id] = event
            else:
                self._append(event)
            return
        if (waiting := self._merged.pop(event.subject, None)) is not None:  # it happened before
            self._append(waiting)
        self._append(event)

    def take(self, until_s: float) -> Event | None:
        """The first event; None if there is none up to `until_s`."""
        if not self._events or self._events[0].t_s > until_s:
            return None
        event = self._events.popleft()
        if isinstance(event, JobReported):
            self._reports[event.job_id] -= 1
            if (waiting := self._merged.pop(event.job_id, None)) is not None:
                self._append(waiting)
            elif not self._reports[event.job_id]:
                del self._reports[event.job_id]
        return event

    def _append(self, event: Event) -> None:
        """Times never go back, even those of merged reports."""
        if isinstance(event, JobReported):
            self._reports[event.job_id] += 1
            if self._events and event.t_s < self._events[-1].t_s:
                event = replace(event, t_s=self._events[-1].t_s)
        self._events.append(event)


_TICK_S = 0.25
"""How often time limits are checked while workers run."""
_AT_ONCE = 256
"""The most steps that run before time limits are checked."""
_ROUNDS = 8
"""Every gang gets a tick at least once in this many ticks."""
_LONGEST_NAP_S = 1.0
"""Longer pauses of the loop count as this long: the process or the machine was asleep."""

Step = Callable[[], None]


class GangLoop:
    """Carries out the effects of gangs, and keeps the events that follow."""

    def __init__(
        self,
        now_s: Callable[[], float],
        spawn: Callable[[Gang, Spawn], None],
        look: Callable[[], None] | None = None,
    ) -> None:
        """`spawn` starts a worker of a gang; `look` polls the nodes, if these can come and go by
        themselves.
        """
        self._now_s = now_s
        self._spawn = spawn
        self._look = look
        self._gangs: deque[Gang] = deque()
        self._at_work: set[Gang] = set()
        self._gang_of: dict[str, Gang] = {}
        self._effects: deque[tuple[Gang, Effect]] = deque()
        self._carrying_out = False
        self._awake_s = 0.0
        self._tick_at_s = 0.0
        self._changed = threading.Condition()
        """Guards everything below, which threads share."""
        self._inbox: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._events = EventQueue()
        self._busy = False
        self._winding_down = False
        self._stopping = False
        self._broken: BaseException | None = None
        self._workers: Workers
        self._thread = threading.Thread(target=self._run, name="elastic substrate", daemon=True)

    def start(self, workers: Workers) -> None:
        self._workers = workers
        self._thread.start()

    # Called from anywhere

    def post(self, step: Step) -> None:
        with self._changed:
            self._inbox.put(step)
            self._busy = True

    def tell(self, gang: Gang, what: Callable[[Gang, Moment], Sequence[Effect]]) -> None:
        """Tell a gang something, and carry out what follows."""
        self.post(lambda: self._do(gang, what(gang, self._now())))

    def tell_all(self, what: Callable[[Gang, Moment], Sequence[Effect]]) -> None:
        def tell() -> None:
            for gang in self._gangs:
                self._do(gang, what(gang, self._now()))

        self.post(tell)

    def acknowledge(self, gang: Gang, epoch: int) -> None:
        self.post(lambda: self._do(gang, gang.acknowledge(epoch)))

    def add(self, gang: Gang) -> None:
        self.post(lambda: self._gangs.append(gang))

    def emit(self, event: Event) -> None:
        with self._changed:
            self._events.put(event)
            self._changed.notify_all()

    def next_event(self, until_s: float, before_waiting: Callable[[], None]) -> Event | None:
        """The next event; None at `until_s`, or, if that is infinite, once nothing runs any more."""
        while True:
            with self._changed:
                if self._events:
                    return self._events.take(until_s)
                if self._broken is not None:
                    raise self._broken
                left_s = until_s - self._now_s()
                if left_s <= 0 or (math.isinf(left_s) and self._is_over()):
                    return None
            before_waiting()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_news(endless=math.isinf(until_s)), min(left_s, threading.TIMEOUT_MAX)
                )

    def wind_down(self) -> None:
        """No further instructions will come."""
        with self._changed:
            self._winding_down = True
            self._changed.notify_all()

    @property
    def awake_s(self) -> float:
        """Seconds in which this loop ran."""
        return self._awake_s

    def wait_until_idle(self, patience_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._broken is not None, patience_s)

    def stop(self) -> None:
        """End the thread."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)
        self._thread.join()

    def _is_news(self, *, endless: bool) -> bool:
        return bool(self._events) or self._broken is not None or (endless and self._is_over())

    def _is_over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return not self._busy and (self._look is None or self._winding_down)

    # Called in this thread

    def strand(self, node: str) -> None:
        for gang in self._gangs:
            self._do(gang, gang.strand(node, self._now()))

    # Called about workers, in this thread

    def seated(self, worker_id: str) -> None:
        gang = self._gang_of[worker_id]
        self._do(gang, gang.seated(worker_id))

    def born(self, worker_id: str) -> None:
        gang = self._gang_of[worker_id]
        self._do(gang, gang.born(worker_id, self._now()))

    def noted(self, worker_id: str, text: str) -> None:
        gang = self._gang_of[worker_id]
        self._do(gang, gang.note(text, self._now()))

    def heard(self, worker_id: str, message: FromWorker) -> None:
        gang = self._gang_of[worker_id]
        self._do(gang, gang.hear(worker_id, message, self._now()))

    def confused(self, worker_id: str, why: str) -> None:
        """The worker may be gone already."""
        gang = self._gang_of.get(worker_id)
        if gang is not None:
            self._do(gang, gang.lose(worker_id, why, self._now()))

    def gone(self, worker_id: str, how: WorkerExit) -> None:
        gang = self._gang_of.pop(worker_id)
        self._do(gang, gang.gone(worker_id, how, self._now()))

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - raised again where the controller asks for events
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _turn(self) -> None:
        """Run the steps that have come in; regularly poll the nodes and check time limits."""
        begun_s = time.monotonic()
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=_TICK_S if self._busy or self._look is not None else None)()
            for _ in range(_AT_ONCE):
                self._inbox.get_nowait()()
        self._awake_s += min(time.monotonic() - begun_s, _LONGEST_NAP_S)
        if self._awake_s >= self._tick_at_s:
            self._tick()
            self._tick_at_s = self._awake_s + _TICK_S
        self._workers.place()
        with self._changed:
            self._busy = bool(self._at_work) or not self._inbox.empty()
            if not self._busy:
                self._changed.notify_all()

    def _tick(self) -> None:
        """If there are many gangs, only some get a tick each time."""
        if self._look is not None:
            self._look()
        for _ in range(min(len(self._gangs), max(_AT_ONCE, len(self._gangs) // _ROUNDS))):
            self._gangs.rotate(-1)
            if self._gangs[-1].busy:
                self._do(self._gangs[-1], self._gangs[-1].tick(self._now()))
        self._workers.forget_silent(self._awake_s)

    def _now(self) -> Moment:
        return Moment(self._now_s(), self._awake_s)

    def _do(self, gang: Gang, effects: Sequence[Effect]) -> None:
        """Carry out effects in order; new ones that follow go to the end of the queue."""
        (self._at_work.add if gang.busy else self._at_work.discard)(gang)
        self._effects.extend((gang, effect) for effect in effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        while self._effects:
            self._carry_out(*self._effects.popleft())
        self._carrying_out = False

    def _carry_out(self, gang: Gang, effect: Effect) -> None:
        match effect:
            case Spawn():
                self._gang_of[effect.worker_id] = gang
                self._spawn(gang, effect)
            case End():
                self._workers.end(effect.worker_id, at_once=False)
            case Kill():
                self._workers.end(effect.worker_id, at_once=True)
            case Send():
                self._workers.send(effect.worker_id, effect.message)
            case Write():
                with (
                    contextlib.suppress(OSError),
                    open(effect.log, "a", encoding="utf-8", opener=private_opener) as log,
                ):
                    log.write(effect.text)
            case Emit():
                self.emit(effect.event)
