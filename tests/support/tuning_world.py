"""A study to compute by hand: every trial follows a written curve, at a written speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from builders import ONE_GPU
from stretto.control.controller import Controller, Settings
from stretto.core.allocation import Allocation
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobReported, JobSubmitted
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample, Result
from stretto.journal.base import Journal, MemoryJournal
from stretto.planning.profile import Latency, Profile, Scaling
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.base import Policy
from stretto.pricing.instances import Instance
from stretto.search.study import Direction, Study
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.worlds.truth import StepTime

TUNING_POLICIES = frozenset({"sha", "asha", "hyperband", "random", "hypersched", "rubberband"})

LINEAR = Scaling(tuple((gpus, float(gpus)) for gpus in (1, 2, 4, 8, 16, 32, 64)))
"""Twice the GPUs, twice the speed."""
RESNET_50 = Scaling(((1, 1.0), (2, 1.87), (4, 3.42), (8, 5.6)))
BATCH = BatchLimits(initial=1024, requested=1024, max=1024, per_gpu_min=1, per_gpu_max=1024)

Curve = Sequence[float | None]
"""A trial's metric after each epoch, the first first; None: not a number."""


def tuning(
    *,
    trials: int,
    rungs: tuple[int, ...],
    eta: int = 2,
    max_epochs: int,
    epoch_s: float = 1.0,
    start_s: float = 0.0,
    scaling: Scaling = LINEAR,
    deadline_s: float | None = None,
    direction: Direction = Direction.MAX,
) -> Tuning:
    """A study and what is believed about it; unless a test says otherwise that is also the truth."""
    return Tuning(
        study=Study(
            name="toy",
            metric="accuracy" if direction is Direction.MAX else "loss",
            direction=direction,
            trials=trials,
            rungs=rungs,
            eta=eta,
            max_epochs=max_epochs,
        ),
        profile=Profile(latency=Latency(epoch_s=epoch_s), scaling=scaling, start_s=start_s),
        instances=(Instance(name="four", gpus=4, usd_per_hour=4.0),),
        max_nodes=16,
        limits=Limits(deadline_s=deadline_s),
    )


def trial_id(number: int) -> str:
    return f"trial-{number:03d}"


def make_trial(conditions: Tuning, number: int, submit_s: float = 0.0) -> Job:
    """The trial that is drawn as the `number`-th."""
    most = conditions.profile.scaling.most_gpus
    return Job(
        id=trial_id(number),
        application=conditions.study.name,
        submit_s=submit_s,
        worker=Role(demand=ONE_GPU, requested=1, min=1, max=most),
        tier=Tier.ELASTIC,
        batch=BATCH,
        work=Work(units_per_epoch=1.0, epochs=conditions.study.max_epochs),
        study=conditions.study.name,
        config=(("number", number),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveTruth:
    """A trial whose results are written down, and whose epochs all take equally long."""

    curve: Curve
    epochs: int
    epoch_s: float = 1.0
    scaling: Scaling = LINEAR

    def units_at(self, epoch: int) -> float:
        return float(epoch)

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        assert atomic > 0
        return StepTime(self.epoch_s / self.scaling.speedup(allocation.worker_count), 0.0)

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        assert total_batch > 0
        assert 0 <= epoch < self.epochs
        return None

    def loss_at(self, epoch: int) -> float | None:
        assert 1 <= epoch <= self.epochs
        return None

    def result_at(self, epoch: int) -> float | None:
        return self.curve[min(epoch, len(self.curve)) - 1]

    def slowness_at(self, epoch: int, allocation: Allocation) -> float:
        assert 0 <= epoch < self.epochs
        assert allocation
        return 1.0


class Draws:
    """Hands out trials in order, some ahead; one that is stopped before it started ends the drawing."""

    def __init__(self, jobs: Sequence[Job], ahead: int) -> None:
        self._jobs = list(jobs)
        self._ahead = ahead
        self._waiting: set[str] = set()
        self._now_s = 0.0

    @property
    def to_come(self) -> int:
        return len(self._jobs)

    def next_s(self) -> float:
        return self._now_s if self._jobs and len(self._waiting) < self._ahead else math.inf

    def due(self, now_s: float) -> Sequence[Job]:
        count = max(self._ahead - len(self._waiting), 0)
        return [replace(job, submit_s=now_s) for job in self._jobs[:count]]

    def observe(self, event: Event) -> None:
        self._now_s = max(self._now_s, event.t_s)
        if isinstance(event, JobSubmitted):
            self._waiting.add(event.job.id)
            self._jobs = [job for job in self._jobs if job.id != event.job.id]
        elif isinstance(event, Decided):
            for instruction in event.instructions:
                self._told(instruction)

    def _told(self, instruction: Instruction) -> None:
        if instruction.job_id in self._waiting:
            self._waiting.remove(instruction.job_id)
            if instruction.action is Action.STOP:
                self._jobs.clear()


@dataclass(frozen=True, slots=True)
class Change:
    """One instruction: who holds how many GPUs from when on."""

    t_s: float
    action: str
    trial: str
    gpus: int


@dataclass(frozen=True)
class Outcome:
    """What became of a study."""

    conditions: Tuning
    events: Sequence[Event]
    decision_s: Sequence[float] = field(default=(), compare=False)
    """How long each decision took the policy."""

    @property
    def changes(self) -> list[Change]:
        """Every start, resize, pause and stop, in order."""
        return [
            Change(event.t_s, str(one.action), one.job_id, one.allocation.worker_count)
            for event in self.events
            if isinstance(event, Decided)
            for one in event.instructions
        ]

    @property
    def started(self) -> list[str]:
        """Trials in the order of their first start."""
        return list(dict.fromkeys(change.trial for change in self.changes if change.action == "start"))

    @property
    def starts(self) -> list[tuple[float, str]]:
        """Every start, resumed trials included: when and whose."""
        return [(change.t_s, change.trial) for change in self.changes if change.action == "start"]

    @property
    def results(self) -> dict[str, list[Result]]:
        """What each trial showed."""
        shown: dict[str, list[Result]] = {}
        for event in self.events:
            if isinstance(event, JobReported):
                shown.setdefault(event.job_id, []).extend(event.results)
        return shown

    @property
    def epochs(self) -> dict[str, int]:
        """How far each trial that reported came."""
        return {trial: results[-1].epoch for trial, results in sorted(self.results.items())}

    @property
    def best(self) -> tuple[str, float]:
        """The best result of all, and whose it is; ties go to the first id."""
        score = self.conditions.study.score
        tops = {
            trial: max(results, key=lambda result: score(result.value))
            for trial, results in self.results.items()
        }
        trial = min(tops, key=lambda trial: (-score(tops[trial].value), trial))
        value = tops[trial].value
        assert value is not None
        return trial, value

    @property
    def finished(self) -> list[str]:
        return [event.job_id for event in self.events if isinstance(event, JobFinished)]

    @property
    def stopped(self) -> dict[str, str]:
        """Why each stopped trial was stopped."""
        return {
            one.job_id: event.reasons[one.job_id].text
            for event in self.events
            if isinstance(event, Decided)
            for one in event.instructions
            if one.action is Action.STOP
        }

    def gpus(self) -> Iterator[tuple[float, dict[str, int]]]:
        """What each trial holds after every event: trial to GPUs, and from when on."""
        held: dict[str, int] = {}
        for event in self.events:
            if isinstance(event, JobFinished | JobFailed):
                held.pop(event.job_id, None)
            elif isinstance(event, Decided):
                for one in event.instructions:
                    held[one.job_id] = one.allocation.worker_count
                held = {trial: count for trial, count in held.items() if count}
            yield event.t_s, dict(held)

    @property
    def most_gpus(self) -> int:
        """GPUs held at once, at the most."""
        return max(sum(held.values()) for _, held in self.gpus())

    @property
    def most_trials(self) -> int:
        """Trials that ran at once, at the most."""
        return max(len(held) for _, held in self.gpus())

    @property
    def gpu_s(self) -> float:
        """GPU seconds held until the last event."""
        return sum(
            sum(held.values()) * (later_s - t_s) for (t_s, held), (later_s, _) in pairwise(self.gpus())
        )

    @property
    def end_s(self) -> float:
        return self.events[-1].t_s


def run(
    policy: Policy,
    conditions: Tuning,
    curves: Sequence[Curve],
    gpus: int,
    *,
    until_s: float | None = None,
    ahead: int | None = None,
    epoch_s: Sequence[float] | None = None,
    start_s: float | None = None,
    scaling: Scaling | None = None,
    nodes: Sequence[Node] | None = None,
    journal: Journal | None = None,
) -> Outcome:
    """Simulate the study of these curves on one node of so many GPUs, or on these nodes.

    `until_s` is the study's deadline unless given; `ahead` trials wait at a time, by default as many as
    there are GPUs; `epoch_s` (of each trial), `start_s` and `scaling` are the truth where
    it is not what is believed.
    """
    journal = journal or MemoryJournal()
    truths = world(conditions, curves, epoch_s=epoch_s, scaling=scaling)
    deadline_s = conditions.limits.deadline_s
    end_s = until_s if until_s is not None else deadline_s if deadline_s is not None else math.inf
    controller = Controller(
        policy=policy,
        substrate=SimSubstrate(
            lambda job: truths[job.id],
            physics=Physics(restart_s=conditions.profile.start_s if start_s is None else start_s),
        ),
        journal=journal,
        nodes=list(nodes or gpu_nodes(1, gpus)),
        arrivals=Draws(
            [make_trial(conditions, number) for number in range(len(curves))],
            ahead=gpus if ahead is None else ahead,
        ),
        settings=Settings(until_s=end_s),
    )
    controller.run()
    return Outcome(conditions, list(journal.events()), controller.decision_s)


def world(
    conditions: Tuning,
    curves: Sequence[Curve],
    *,
    epoch_s: Sequence[float] | None = None,
    scaling: Scaling | None = None,
) -> dict[str, CurveTruth]:
    """The truth about each trial."""
    return {
        trial_id(number): CurveTruth(
            curve=curve,
            epochs=conditions.study.max_epochs,
            epoch_s=conditions.profile.latency.epoch_s if epoch_s is None else epoch_s[number],
            scaling=scaling or conditions.profile.scaling,
        )
        for number, curve in enumerate(curves)
    }


def steady(*values: float, epochs: int) -> list[list[float | None]]:
    """Curves that show the same value at every epoch."""
    return [[value] * epochs for value in values]
