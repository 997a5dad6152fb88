"""Drives a real run: the controller over a substrate of processes, to a clean end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from stretto.control.controller import Controller, Limit, Settings
from stretto.core.cluster import Node
from stretto.core.errors import JournalError
from stretto.core.events import Event, RunPaused, RunStarted
from stretto.core.source import JobSource
from stretto.core.substrate import Substrate
from stretto.driving.stop import Stop, listening
from stretto.journal.base import Journal
from stretto.journal.sqlite import SqliteJournal
from stretto.models.resize import WARM_RESIZE_S
from stretto.planning.tuning import Tuning
from stretto.policies.base import Policy, is_built_in
from stretto.runs.deadline import AtDeadline, EndedBy
from stretto.runs.folder import RunFolder
from stretto.runs.status import holding
from stretto.system.locks import FileLock
from stretto.system.threads import one_blas_thread

BEAT_S = 0.2
"""How soon Ctrl-C is noticed and a display is redrawn."""
LOOK_S = 1.0
"""How often the run's folder is checked for being moved or removed."""
ALIKE = 100
"""The most equal jobs waiting for their first start that a built-in policy is shown, unless more could
start. A user's own policy is shown all."""


class RealSubstrate(Substrate, Protocol):
    """A substrate of processes."""

    def finish_epochs(self) -> None:
        """Lets every running job finish its epoch, save and leave."""

    def stop_now(self) -> None:
        """Kills every process at once."""


class Observer(Protocol):
    """Sees every event of a run, for displays and early stopping."""

    def observe(self, event: Event) -> None:
        """An event, also those before the run was resumed."""

    def tick(self, now_s: float) -> None:
        """Called a few times a second."""


class NoObserver:
    """Ignores everything."""

    def observe(self, event: Event) -> None:
        """Does nothing."""

    def tick(self, now_s: float) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """Everything a real run is made of."""

    folder: RunFolder
    policy: Policy
    make: Callable[[], RealSubstrate]
    """Makes the substrate."""
    nodes: tuple[Node, ...]
    source: JobSource
    seed: int = 0
    deadline_s: float | None = None
    at_deadline: AtDeadline = AtDeadline.STOP
    limit: Limit | None = None
    share_priors: bool = False


def wall_clock(started_at_s: float) -> Callable[[], float]:
    """Seconds since the run first started, downtime included; immune to later changes of the clock."""
    offset_s = time.time() - started_at_s - _boot_clock_s()
    return lambda: _boot_clock_s() + offset_s


def _boot_clock_s() -> float:
    """A clock that cannot be set and that counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def drive(run: RealRun, stop: Stop, observer: Observer) -> EndedBy:
    """Starts the run, or resumes it where the journal ends, until it is over or `stop` is asked."""
    # The lock comes first: it shows at once that the run is active, while the substrate waits for leftovers.
    with (
        one_blas_thread(),
        holding(run.folder) as lock,
        closing(SqliteJournal(run.folder.journal, run=run.folder.name, lock=lock)) as file,
        listening(stop),
    ):
        journal = _ObservedJournal(file, observer, run.policy)
        with _running(run.make(), journal, stop) as substrate:
            return _drive(run, substrate, journal, stop, _AtItsPlace(observer, lock))


def _drive(
    run: RealRun, substrate: RealSubstrate, journal: Journal, stop: Stop, observer: Observer
) -> EndedBy:
    for event in journal.events():
        observer.observe(event)
    observer.tick(substrate.now_s())
    until_s = math.inf if run.deadline_s is None else run.deadline_s
    controller = Controller(
        policy=run.policy,
        substrate=substrate,
        journal=journal,
        nodes=run.nodes,
        arrivals=run.source,
        settings=Settings(
            seed=run.seed,
            until_s=until_s,
            alike=ALIKE if is_built_in(run.policy) else 0,
            beat_s=BEAT_S,
            share_priors=run.share_priors,
            resize_s=WARM_RESIZE_S,
        ),
        limit=run.limit,
        on_turn=lambda _: observer.tick(substrate.now_s()),
        stop=stop,
    )
    controller.run()
    observer.tick(substrate.now_s())
    ended_by = _ending(controller, substrate.now_s(), until_s, run.limit, asked=stop())
    if ended_by is EndedBy.DEADLINE and run.at_deadline is AtDeadline.FINISH_EPOCH:
        stop.impatient = True
        with suppress(KeyboardInterrupt):
            substrate.finish_epochs()
            controller.record_rest(math.inf)
        stop.impatient = False
    substrate.close()
    controller.record_rest(substrate.now_s())
    if not ended_by.is_final:
        controller.record_pause()
    return ended_by


def _ending(
    controller: Controller, now_s: float, until_s: float, limit: Limit | None, *, asked: bool
) -> EndedBy:
    if not controller.state.jobs and not controller.jobs_to_come:
        return EndedBy.JOBS
    if now_s >= until_s:
        return EndedBy.DEADLINE
    if limit is not None and now_s >= limit.ends_s():
        return EndedBy.BUDGET
    return EndedBy.REQUEST if asked else EndedBy.STALLED


@contextmanager
def _running(substrate: RealSubstrate, journal: _ObservedJournal, stop: Stop) -> Iterator[RealSubstrate]:
    """However the block ends, all processes are stopped and that is journaled; a second Ctrl-C kills."""
    try:
        try:
            yield substrate
        except Exception:
            substrate.close()
            journal.record_break(substrate.now_s())
            raise
    except KeyboardInterrupt:
        stop.ask()
        substrate.stop_now()
        journal.record_break(substrate.now_s())
        raise


class _AtItsPlace:
    """An observer that also checks that the run's folder is still in its place."""

    def __init__(self, inner: Observer, lock: FileLock) -> None:
        self._inner = inner
        self._lock = lock
        self._looked_s = -math.inf

    def observe(self, event: Event) -> None:
        self._inner.observe(event)

    def tick(self, now_s: float) -> None:
        if abs(now_s - self._looked_s) >= LOOK_S:
            self._looked_s = now_s
            if not self._lock.is_in_place:
                raise JournalError(
                    f"{self._lock.path.parent} was moved or removed while the run was live. "
                    "Nothing can be written there, so the run was stopped. To resume, move the folder back "
                    "and start the run again, or start it under another --name."
                )
        self._inner.tick(now_s)


class _ObservedJournal:
    """A journal whose new events an observer sees, and that shows the present limits of the policy."""

    def __init__(self, inner: Journal, observer: Observer, policy: Policy) -> None:
        self._inner = inner
        self._observer = observer
        self._policy = policy
        self._grown = False

    def append(self, events: Sequence[Event]) -> None:
        self._inner.append(events)
        self._grown = True
        for event in events:
            self._observer.observe(event)

    def events(self) -> Iterator[Event]:
        return (_with_limits_of(self._policy, event) for event in self._inner.events())

    def record_break(self, t_s: float) -> None:
        """Journals that the run was broken off and all its rented nodes are released."""
        if self._grown:
            with suppress(JournalError):  # the journal may be the cause
                self.append([RunPaused(t_s=t_s)])

    def close(self) -> None:
        self._inner.close()


def _with_limits_of(policy: Policy, event: Event) -> Event:
    """The event with the present limits: they may have been raised since the run was begun."""
    tuning = getattr(policy, "tuning", None)
    if not isinstance(event, RunStarted) or not isinstance(tuning, Tuning):
        return event
    place = f"{policy.name}.tuning.limits"
    now = {
        f"{place}.deadline_s": str(tuning.limits.deadline_s),
        f"{place}.budget_usd": str(tuning.limits.budget_usd),
    }
    moved = {name: now.get(name, begun) for name, begun in event.identity.items()}
    return dataclasses.replace(event, identity=moved)
