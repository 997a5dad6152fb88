"""The event loop of simulations and real runs: events in, a decision when it is due, instructions out."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from stretto.control.instruct import check, instructions_for
from stretto.control.state import RunState
from stretto.core.cluster import Node
from stretto.core.errors import JournalError
from stretto.core.events import Decided, Event, JobSubmitted, RunPaused, RunResumed, RunStarted
from stretto.core.seeds import child_rng
from stretto.core.source import JobSource
from stretto.core.substrate import Substrate
from stretto.journal.base import Journal
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.policies.asking import ask
from stretto.policies.base import Memory, Policy, is_built_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run is driven."""

    seed: int = 0
    rounds: bool = False
    """Decide only at multiples of the policy's interval, as the published simulators do."""
    share_priors: bool = False
    """Let new jobs start from what finished jobs of their application showed."""
    resize_s: float = DEFAULT_RESIZE_S
    """What a start or resize of an application is believed to take while none was seen."""
    until_s: float = math.inf
    """End the run at this time, finished or not."""
    alike: int = 0
    """The most equal jobs waiting for their first start that a policy is shown, unless more could start.

    0: all. If thousands wait, a decision should not look at each.
    """
    beat_s: float = math.inf
    """The longest wait for an event: then `stop` is checked and `on_turn` is called."""


EPS = 1e-9
"""Float noise in times."""
PATIENCE = 10
"""A run counts as stalled after this many decisions in a row that start nothing while nothing runs."""
PATIENCE_WITH_WAKERS = 1000
"""The same for a policy that says when to ask it again: it waits for something."""


MOST_AT_ONCE = 1000
"""The most events that are processed before anything else is checked."""


class Limit(Protocol):
    """A limit that may be reached during a run, such as a budget."""

    def observe(self, event: Event) -> None:
        """Process an event."""

    def ends_s(self) -> float:
        """When the run must end if nothing changes; infinite if never."""


class Controller:
    """Drives one policy over one substrate, journaling every event before acting on it."""

    def __init__(
        self,
        *,
        policy: Policy,
        substrate: Substrate,
        journal: Journal,
        nodes: Sequence[Node],
        arrivals: JobSource,
        settings: Settings,
        limit: Limit | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
        on_turn: Callable[[Controller], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._policy = policy
        self._substrate = substrate
        self._journal = journal
        self._settings = settings
        self._stopwatch = stopwatch
        self._on_turn = on_turn
        self._stop = stop
        self._arrivals = arrivals
        self._limit = limit
        self._wakes_on = frozenset[str]() if settings.rounds else policy.wakes_on
        self._due = False
        self._ticked_s = 0.0
        self._fruitless = 0
        self._held: list[Event] = []
        """Folded already, and not yet in the journal."""
        self.state = RunState(
            share_priors=settings.share_priors,
            resize_s=settings.resize_s,
            alike=settings.alike,
            shelves=getattr(policy, "looks_up_paused", False),
        )
        self.decision_s: list[float] = []
        """How long each decision of this process took, fits and tables included."""

        identity = _identity(policy, settings, nodes)
        known, last_s = 0, 0.0
        for event in journal.events():
            if isinstance(event, RunStarted):
                _check_identity(event.identity, identity)
            self._fold(event)
            known, last_s = known + 1, max(last_s, event.t_s)
        if known:
            self._record_resumption(last_s)
            substrate.recover(islice(journal.events(), known))  # its events come after that
        else:
            self._record([RunStarted(t_s=0.0, identity=identity, nodes=tuple(nodes))])

    @property
    def jobs_to_come(self) -> int:
        return self._arrivals.to_come

    def run(self) -> None:
        """Run until all jobs are finished, nothing can happen any more, the time is up, or `stop` is true."""
        while (self._arrivals.to_come or self.state.jobs) and not self._stop():
            if self._stalled() and not self._something_happens():
                return
            self._turn()
            if self._on_turn is not None:
                self._on_turn(self)
            if self._substrate.now_s() >= self._until_s():
                return

    def record_rest(self, until_s: float) -> None:
        """Record what still happens until then, without any decision: for the time after `run`."""
        while (event := self._substrate.next_event(until_s)) is not None:
            self._record([event])

    def record_pause(self) -> None:
        """Record that nothing runs from now on: for the time after `run`."""
        self._record([RunPaused(t_s=self._substrate.now_s())])

    def _record_resumption(self, last_s: float) -> None:
        """Record the time in which no controller ran, if the clock went on meanwhile."""
        now_s = self._substrate.now_s()
        if now_s > last_s:
            self._record([RunResumed(t_s=now_s, down_s=now_s - last_s)])

    def _turn(self) -> None:
        due_s = self._next_time_s()
        until_s = self._within_a_beat(due_s)
        try:
            while (event := self._next_event(until_s)) is not None:
                self._hold(event)
                if event.kind in self._wakes_on:
                    until_s = due_s = event.t_s
                elif len(self._held) >= MOST_AT_ONCE:
                    until_s = min(until_s, event.t_s)
                    break
                if self._stop():
                    return
            if until_s < due_s:
                return
            self._admit_arrivals(until_s)
            if self.state.jobs and until_s < self._until_s() and self._is_time(until_s):
                self._decide(until_s)
        finally:  # also if the policy makes a mistake
            self._record([])
        self._due = False

    def _next_event(self, until_s: float) -> Event | None:
        """The next event. Events that have already come are journaled together before we wait for another."""
        if self._held and self._settings.beat_s < math.inf:
            now_s = self._substrate.now_s()
            event = self._substrate.next_event(min(until_s, now_s))
            if event is not None or until_s <= now_s:
                return event
        if self._held and (self._settings.beat_s < math.inf or not self._due):
            self._record([])
        return self._substrate.next_event(until_s)

    def _within_a_beat(self, time_s: float) -> float:
        return min(time_s, self._substrate.now_s() + self._settings.beat_s)

    def _next_time_s(self) -> float:
        """The next time at which something is due, whatever the substrate reports before."""
        now_s = self._substrate.now_s()
        if self._due:
            return now_s
        times = [self._until_s(), self._arrivals.next_s()]
        if self.state.jobs:
            times.append(self._next_tick_s(now_s))
            if self.state.wake_at_s is not None and not self._settings.rounds:
                times.append(self.state.wake_at_s)
        return max(min(times), now_s)

    def _until_s(self) -> float:
        """When the run ends at the latest: here its deadline and its budget are enforced."""
        return (
            self._settings.until_s
            if self._limit is None
            else min(self._settings.until_s, self._limit.ends_s())
        )

    def _next_tick_s(self, now_s: float) -> float:
        """The first multiple of the interval that has not passed and had no decision yet."""
        interval_s = self._policy.interval_s
        undecided = math.floor(self._ticked_s / interval_s + EPS) + 1
        to_come = math.ceil(now_s / interval_s - EPS)
        return max(undecided, to_come) * interval_s

    def _is_time(self, now_s: float) -> bool:
        wake_s = self.state.wake_at_s
        woken = wake_s is not None and not self._settings.rounds and now_s >= wake_s
        return self._due or woken or now_s >= self._next_tick_s(now_s) - EPS

    def _admit_arrivals(self, now_s: float) -> None:
        jobs = self._arrivals.due(now_s)
        if jobs:
            self._record([JobSubmitted(t_s=job.submit_s, job=job) for job in jobs])
        for job in jobs:
            self._substrate.admit(job)

    def _decide(self, now_s: float) -> None:
        view = self.state.view(now_s)
        rng = child_rng(self._settings.seed, "policy", str(self.state.decisions))
        started = self._stopwatch()
        decision, memory = ask(self._policy, view, self._own_memory(), rng)
        self.decision_s.append(self._stopwatch() - started)
        view = self.state.view_of(view, decision)
        check(view, decision)
        instructions = instructions_for(
            view,
            decision,
            self.state.instructions + 1,
            batch_in_place=self._substrate.changes_batch_in_place,
        )
        wish = decision.wish if decision.wish != self.state.wish else None
        changed = {instruction.job_id for instruction in instructions}
        reasons = {
            job_id: reason
            for job_id, reason in decision.reasons.items()
            if job_id in changed or self.state.is_news(job_id, reason)
        } | self.state.news_of_hidden(decision.reasons)
        self._record(
            [
                Decided(
                    t_s=now_s,
                    policy=self._policy.name,
                    instructions=instructions,
                    reasons=reasons,
                    memory=memory,
                    wake_at_s=decision.wake_at_s,
                    wish=wish,
                )
            ]
        )
        self._substrate.apply(instructions)
        if wish is not None:
            self._substrate.provision(wish)

    def _own_memory(self) -> Memory:
        """A copy for policies of users, which might change it: the journal finds changes by comparing."""
        return self.state.memory if is_built_in(self._policy) else copy.deepcopy(self.state.memory)

    def _hold(self, event: Event) -> None:
        """Fold an event now; journal it together with the next decision, before that is carried out."""
        self._held.append(event)
        self._fold(event)

    def _record(self, events: Sequence[Event]) -> None:
        held, self._held = self._held, []
        self._journal.append([*held, *events])
        for event in events:
            self._fold(event)

    def _fold(self, event: Event) -> None:
        """Update the state of the loop. A resumed run folds its journal, so what was due is still due."""
        self.state.apply(event)
        self._arrivals.observe(event)
        if self._limit is not None:
            self._limit.observe(event)
        if isinstance(event, Decided):
            self._due = False
            self._ticked_s = event.t_s
            self._fruitless = self._fruitless + 1 if self.state.is_idle else 0
        elif event.kind in self._wakes_on:
            self._due = True

    def _stalled(self) -> bool:
        """Whether no job runs or will arrive, and the policy starts none although it was asked repeatedly."""
        patience = PATIENCE if self.state.wake_at_s is None else PATIENCE_WITH_WAKERS
        return self._arrivals.next_s() == math.inf and self._fruitless >= patience

    def _something_happens(self) -> bool:
        """Wait for the substrate, which may still add a node. A simulation returns None if nothing can come.

        A real substrate cannot know that: it gets one more interval of the policy.
        """
        until_s = self._until_s()
        if self._settings.beat_s < math.inf:
            until_s = min(until_s, self._substrate.now_s() + self._policy.interval_s)
        while (event := self._substrate.next_event(self._within_a_beat(until_s))) is None:
            if self._settings.beat_s == math.inf or self._substrate.now_s() >= until_s or self._stop():
                return False
        self._record([event])
        self._fruitless = 0
        return True


def _identity(policy: Policy, settings: Settings, nodes: Sequence[Node]) -> dict[str, str]:
    """What must be equal for a run to be resumed."""
    return {
        "policy": policy.name,
        **dict(_options(policy.name, policy)),
        "seed": str(settings.seed),
        "rounds": str(settings.rounds),
        "priors": str(settings.share_priors),
        "nodes": ", ".join(f"{node.id}: {node.capacity}" for node in nodes),
    }


def _options(name: str, holder: object) -> Iterator[tuple[str, str]]:
    """Every option by its full name, including options nested in other values."""
    if not dataclasses.is_dataclass(holder):
        return
    for field in dataclasses.fields(holder):
        value = getattr(holder, field.name)
        if field.name == "oracle" or not field.compare:
            continue
        if dataclasses.is_dataclass(value):
            yield from _options(f"{name}.{field.name}", value)
        else:
            yield f"{name}.{field.name}", str(value)


def _check_identity(begun: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in {**begun, **now}:
        if begun.get(name) != now.get(name):
            raise JournalError(
                f"this run was begun with {name} {begun.get(name)} and cannot continue with {now.get(name)}; "
                "use the same, or another journal"
            )
