"""A bench for little Python programs that run as the command of a job."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import live_processes
from stretto.core.allocation import Allocation, BatchChoice, on_nodes
from stretto.core.events import Event
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Value, Work
from stretto.core.resources import Resources
from stretto.substrate.elastic.command import Command, check_placeholders
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import NO_ENTRY
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots

EPOCHS = 8
BATCH = BatchChoice(16)
ONE, TWO = on_nodes({"0": 1}), on_nodes({"0": 1, "1": 1})
FOUR_CORES = Slots(("",) * 4)
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


class CommandWorkers(LocalSubstrate):
    """Commands by the id of the job, or of the study whose trials run them, on slots of this machine."""

    def __init__(
        self,
        commands: Mapping[str, Command],
        folder: Path,
        *,
        slots: Slots = FOUR_CORES,
        clock: Callable[[], float] | None = None,
        rules: Rules,
    ) -> None:
        began_s = time.monotonic()

        def spec_of(job: Job) -> TrainingJob:
            command = commands.get(job.id) or commands[job.study or ""]
            check_placeholders(command, job)
            return TrainingJob(
                entry=NO_ENTRY, config={}, epochs=job.work.epochs, metric=command.metric, command=command
            )

        super().__init__(
            spec_of=spec_of,
            run_dir=folder,
            slots=slots,
            clock=clock or (lambda: time.monotonic() - began_s),
            rules=rules,
            runs_commands=True,
        )


class Bench:
    """One job `a` that runs a little Python code."""

    def __init__(self, folder: Path, grace_s: float = 1.0, retries: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.grace_s = grace_s
        self.retries = retries
        self.slots = FOUR_CORES
        self.clock: Callable[[], float] | None = None
        self.log = folder / "jobs" / "a" / "stdout.log"
        self.metrics = folder / "jobs" / "a" / "metrics.jsonl"
        self._open: list[CommandWorkers] = []

    def substrate(self, command: Command, name: str = "a") -> CommandWorkers:
        """`name` is that of the job, or of a study."""
        made = CommandWorkers(
            {name: command},
            self.folder,
            slots=self.slots,
            clock=self.clock,
            rules=Rules(command_s=self.grace_s, retries=self.retries),
        )
        self._open.append(made)
        return made

    def started(
        self, command: Command, allocation: Allocation = ONE, job: Job | None = None
    ) -> CommandWorkers:
        substrate = self.substrate(command)
        substrate.admit(job or job_of("a"))
        substrate.apply([start("a", allocation)])
        return substrate

    def code(self, text: str, *arguments: str, metric: str | None = None) -> Command:
        """A command that mentions the folder, so that what it leaves can be found."""
        script = self.folder / "code.py"
        script.write_text("import json, os, signal, sys, time, subprocess\n" + text)
        return Command((*PYTHON, str(script), *arguments), metric=metric)

    def left(self) -> list[str]:
        return live_processes.running_with(str(self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for substrate in self._open:
            substrate.close()
        assert self.left() == []


def all_events(substrate: CommandWorkers) -> list[Event]:
    """Until nothing runs any more."""
    seen = []
    while (event := substrate.next_event(float("inf"))) is not None:
        seen.append(event)
    return seen
