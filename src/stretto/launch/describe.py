"""Asks the training code of jobs for its batch limits and loaders before they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed, JobFinished
from stretto.core.instructions import Action, Instruction
from stretto.core.substrate import Substrate
from stretto.core.units import format_duration
from stretto.driving.drive import wall_clock
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import OpenTarget
from stretto.inputs.jobs import JobSpec
from stretto.inputs.work import sample_job
from stretto.profiling.probe_data import SlotMap
from stretto.substrate.elastic.substrate import ElasticSubstrate
from stretto.wire.messages import Described

DESCRIBE_S = 300.0
"""The longest wait for the first batch of a training code."""
SILENCE_S = 10.0
"""After this much silence, and whenever it has doubled, a line names the job."""
LOOK_S = 0.1
HOW = (
    "Give the loader to run.prepare, and go through it inside run.epochs; code that draws its own data loops "
    "over run.steps(n, batch_size=..)."
)

Tell = Callable[[str], None]


class Describing(Substrate, Protocol):
    """A substrate whose training code describes itself."""

    def described(self, job_id: str) -> Described | None: ...

    def is_born(self, job_id: str) -> bool: ...


def describe_entries(
    jobs: Sequence[JobSpec], target: OpenTarget, log: Path, *, tell: Tell
) -> dict[str, Described]:
    """Starts the training code of each job up to its first batch, which shows what the job needs."""
    works = {job.name: job.work for job in jobs}
    training = TrainingSpec(
        work=lambda job: works.get(job.id, jobs[0].work),
        slots=sum(node.gpus for node in target.nodes),
        nodes=target.nodes,
        retries=0,
        temporary=True,
        describe_only=True,
    )
    with target.scratch("describe", log) as folder:
        substrate = target.make(training, folder, wall_clock(time.time()))
        assert isinstance(substrate, ElasticSubstrate), "commands cannot be asked"
        try:
            return described_by(substrate, jobs, SlotMap(target.nodes), slots=training.slots, tell=tell)
        finally:
            substrate.stop_now()


def described_by(
    substrate: Describing, jobs: Sequence[JobSpec], slot_map: SlotMap, *, slots: int, tell: Tell
) -> dict[str, Described]:
    """Asks one job per slot at a time; jobs with equal training and configuration are asked once."""
    alike: dict[tuple[object, object], list[str]] = {}
    for job in jobs:
        alike.setdefault((job.work, job.config), []).append(job.name)
    asking = _Asking(substrate, slot_map, tell, of=len(jobs))
    numbered = [(number, job) for number, job in enumerate(jobs, 1) if _first(alike, job) == job.name]
    found: dict[str, Described] = {}
    while numbered or asking.open:
        while numbered and len(asking.open) < slots:
            asking.start(*numbered.pop(0))
        for job, described in asking.look():
            found |= dict.fromkeys(alike[job.work, job.config], described)
    return {job.name: found[job.name] for job in jobs}


def _first(alike: dict[tuple[object, object], list[str]], job: JobSpec) -> str:
    return alike[job.work, job.config][0]


@dataclass(slots=True)
class _Open:
    """A job that has not answered yet."""

    job: JobSpec
    since_s: float
    say_after_s: float = SILENCE_S


class _Asking:
    """The jobs that are being asked."""

    def __init__(self, substrate: Describing, slot_map: SlotMap, tell: Tell, *, of: int) -> None:
        self._substrate = substrate
        self._slot_map = slot_map
        self._tell = tell
        self._of = of
        self._numbers = count(1)
        self.open: dict[str, _Open] = {}

    def start(self, number: int, spec: JobSpec) -> None:
        self._tell(f"looking at job {number} of {self._of}: {spec.name}")
        job = sample_job(spec.name, spec.config)
        self._substrate.admit(job)
        one = self._slot_map.place(job.id, 1)
        start = Instruction(next(self._numbers), Action.START, job.id, one, BatchChoice(1))
        self._substrate.apply([start])
        self.open[job.id] = _Open(spec, self._substrate.now_s())

    def look(self) -> Iterable[tuple[JobSpec, Described]]:
        """Waits a moment and returns the jobs that have answered."""
        event = self._substrate.next_event(self._substrate.now_s() + LOOK_S)
        answers = [(one.job, said) for one in self.open.values() if (said := self._said(one)) is not None]
        for job, _ in answers:
            del self.open[job.name]
            self._slot_map.clear(job.name)
        if event is not None:
            self._check_goes_on(event)
        for one in self.open.values():
            self._check_time(one)
        return answers

    def _said(self, one: _Open) -> Described | None:
        return self._substrate.described(one.job.name)

    def _check_goes_on(self, event: Event) -> None:
        if event.subject not in self.open:
            return
        where = f"job {event.subject}"
        if isinstance(event, JobFailed):
            raise InputError("the training code failed.", where=where, remedy=event.error, log=event.log)
        if isinstance(event, JobFinished):
            raise InputError(
                "the training function ended without a batch of a loader.", where=where, remedy=HOW
            )

    def _check_time(self, one: _Open) -> None:
        waited_s = self._substrate.now_s() - one.since_s
        if waited_s < min(one.say_after_s, DESCRIBE_S):
            return
        born = self._substrate.is_born(one.job.name)
        doing = "the training function has taken no batch" if born else "the training code is being imported"
        if waited_s >= DESCRIBE_S:
            raise InputError(
                f"it is not known what it trains after {format_duration(DESCRIBE_S)}: {doing}.",
                where=f"job {one.job.name}",
                remedy=HOW,
            )
        one.say_after_s *= 2.0
        self._tell(f"job {one.job.name}: {doing}, after {format_duration(waited_s)}")
