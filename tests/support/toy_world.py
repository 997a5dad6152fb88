"""A world to compute by hand: constant speeds, a watched policy, a substrate that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from builders import make_job
from stretto.core.allocation import Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Wish
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import Event
from stretto.core.instructions import Instruction
from stretto.core.job import Job, Work
from stretto.core.observations import NoiseSample
from stretto.policies.base import ClusterView, Memory, Policy
from stretto.policies.fifo import Fifo
from stretto.worlds.truth import StepTime, Workload, make_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyTruth:
    """A step takes `step_s`, and `example_s` more for each example of a worker; waiting is a part of it."""

    epochs: int = 2
    units_per_epoch: float = 100.0
    step_s: float = 1.0
    example_s: float = 0.0
    sync_s: float = 0.0
    split: bool = False
    """Whether workers share the step, so that k of them take a k-th of the time."""
    noise: NoiseSample | None = None

    def units_at(self, epoch: int) -> float:
        return epoch * self.units_per_epoch

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        assert allocation, "only a job that holds something has a speed"
        share = 1.0 / allocation.worker_count if self.split else 1.0
        return StepTime((self.step_s + self.example_s * atomic) * share, self.sync_s)

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        assert total_batch > 0
        assert 0 <= epoch < self.epochs
        return self.noise

    def loss_at(self, epoch: int) -> float | None:
        assert 1 <= epoch <= self.epochs
        return 1.0 / epoch


def toy_job(job_id: str, workers: int = 1, *, submit_s: float = 0.0, most: int | None = None) -> Job:
    job = make_job(job_id, workers, least=1 if most else None, most=most)
    return replace(job, submit_s=submit_s, work=Work(units_per_epoch=100.0, epochs=2))


def toy_workload(*jobs: Job, truth: ToyTruth | None = None) -> Workload:
    return make_workload("toy", [(job, truth or ToyTruth()) for job in jobs])


def says(code: ReasonCode) -> Reason:
    return Reason(code, "as the test says")


def runs(**allocations: dict[str, int]) -> Decision:
    """A decision by hand: workers per node of each job, every one with a reason."""
    return Decision(
        allocations={job_id: on_nodes(workers) for job_id, workers in allocations.items()},
        batches={job_id: BatchChoice(128) for job_id in allocations},
        reasons={job_id: says(ReasonCode.STARTED) for job_id in allocations},
    )


@dataclass(kw_only=True)
class Watched:
    """A policy that shows what it was asked, and answers as another policy, or a test, says."""

    name: str = "watched"
    interval_s: float = 60.0
    wakes_on: frozenset[str] = Fifo.wakes_on
    inner: Policy = field(default_factory=Fifo)
    answer: Callable[[ClusterView], Decision] | None = None
    wake_after_s: float | None = None
    views: list[ClusterView] = field(default_factory=list)

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        self.views.append(view)
        if self.answer is not None:
            return self.answer(view), memory
        decision, memory = self.inner.decide(view, memory, rng)
        wake_at_s = None if self.wake_after_s is None else view.now_s + self.wake_after_s
        return replace(decision, wake_at_s=wake_at_s), memory

    @property
    def times_s(self) -> list[float]:
        return [view.now_s for view in self.views]


class Scripted:
    """A substrate in which exactly the given events happen, whatever it is told."""

    changes_batch_in_place = True

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._to_come = sorted(events, key=lambda event: event.t_s)
        self._now_s = 0.0
        self.admitted: list[str] = []
        self.wishes: list[Wish] = []
        self.told: list[tuple[float, Instruction]] = []

    def now_s(self) -> float:
        return self._now_s

    def admit(self, job: Job) -> None:
        self.admitted.append(job.id)

    def apply(self, instructions: Sequence[Instruction]) -> None:
        self.told += [(self._now_s, instruction) for instruction in instructions]

    def provision(self, wish: Wish) -> None:
        self.wishes.append(wish)

    def next_event(self, until_s: float) -> Event | None:
        if self._to_come and self._to_come[0].t_s <= until_s:
            event = self._to_come.pop(0)
            self._now_s = max(self._now_s, event.t_s)
            return event
        self._now_s = max(self._now_s, until_s)
        return None

    def recover(self, history: Iterable[Event]) -> None:
        """The script has only what is still to come."""
        self._now_s = max((event.t_s for event in history), default=0.0)

    def close(self) -> None:
        self._to_come.clear()

    @property
    def summary(self) -> list[tuple[float, str, str, tuple[str, ...]]]:
        """When, what, whom, where."""
        return [(t_s, str(one.action), one.job_id, one.allocation.nodes) for t_s, one in self.told]
