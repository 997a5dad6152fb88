"""A bench for little Python programs that run as the command of a job."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import live_processes
from stretto.core.allocation import Allocation, BatchChoice, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.events import Event
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Value, Work
from stretto.core.resources import Resources
from stretto.substrate.local.commands import Command, ProcessSubstrate

EPOCHS = 8
BATCH = BatchChoice(16)
ONE, TWO = on_nodes({"0": 1}), on_nodes({"0": 1, "1": 1})
PYTHON = (sys.executable, "-I", "-S")


def job_of(job_id: str, *, epochs: int | None = None) -> Job:
    """A job that is done when its command ends, or after so many epochs."""
    return Job(
        id=job_id,
        application="tiny",
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1), max=2),
        batch=BatchLimits(initial=16, requested=16, max=64, per_gpu_min=1, per_gpu_max=64),
        work=Work(units_per_epoch=10.0, epochs=epochs),
    )


def trial_of(job_id: str, *, epochs: int | None = 3, tier: Tier = Tier.ELASTIC, **config: Value) -> Job:
    """A trial of the study `s`."""
    work = Work(units_per_epoch=1.0, epochs=epochs)
    return replace(job_of(job_id), study="s", work=work, tier=tier, config=tuple(config.items()))


eventually = functools.partial(live_processes.eventually, within_s=30.0)


def start(job_id: str = "a", allocation: Allocation = ONE, number: int = 1) -> Instruction:
    return Instruction(number, Action.START, job_id, allocation, BATCH)


class Bench:
    """One job `a` that runs a little Python code."""

    def __init__(self, folder: Path, grace_s: float = 1.0, retries: int = 0) -> None:
        self.folder = folder
        self.grace_s = grace_s
        self.retries = retries
        self.devices: Mapping[str, Sequence[str]] = {}
        self.clock: Callable[[], float] | None = None
        self.log = folder / "jobs" / "a" / "stdout.log"
        self.metrics = folder / "jobs" / "a" / "metrics.jsonl"
        self._open: list[ProcessSubstrate] = []

    def substrate(self, command: Command, name: str = "a") -> ProcessSubstrate:
        """`name` is that of the job, or of a study."""
        made = ProcessSubstrate(
            gpu_nodes(2, 4),
            {name: command},
            run_dir=self.folder,
            devices=self.devices,
            clock=self.clock,
            grace_s=self.grace_s,
            retries=self.retries,
        )
        self._open.append(made)
        return made

    def started(
        self, command: Command, allocation: Allocation = ONE, job: Job | None = None
    ) -> ProcessSubstrate:
        substrate = self.substrate(command)
        substrate.admit(job or job_of("a"))
        substrate.apply([start("a", allocation)])
        return substrate

    def code(self, text: str, *arguments: str, gang: bool = False, metric: str | None = None) -> Command:
        """A command that mentions the folder, so that what it leaves can be found."""
        script = self.folder / "code.py"
        script.write_text("import json, os, signal, sys, time, subprocess\n" + text)
        return Command((*PYTHON, str(script), *arguments), gang=gang, metric=metric)

    def left(self) -> list[str]:
        return live_processes.running_with(str(self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for substrate in self._open:
            substrate.close()
        assert self.left() == []


def all_events(substrate: ProcessSubstrate) -> list[Event]:
    """Until nothing runs any more."""
    seen = []
    while (event := substrate.next_event(float("inf"))) is not None:
        seen.append(event)
    return seen
