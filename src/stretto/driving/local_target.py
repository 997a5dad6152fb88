"""This machine as a target: its GPUs, or its cores where it has none.

STORE/RUN/id          the same as in the run's folder
STORE/RUN/jobs/ID/    the checkpoints of a job
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stretto.core.cluster import Node
from stretto.driving.drive import RealSubstrate
from stretto.driving.substrate import TrainingSpec, check_tensorboard, training_job
from stretto.driving.target import (
    LOCAL,
    OpenTarget,
    TargetRequest,
    check_slot_count,
    check_storable,
    node_of,
    scratch,
)
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.inputs.work import RealWork
from stretto.pricing.instances import Offer
from stretto.runs.folder import RunFolder, Tables
from stretto.runs.status import live_runs, neighbour_notes
from stretto.runs.store import store_of
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.elastic.substrate import JobFiles
from stretto.substrate.fleet.provision import NodeFleet
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import find_slots, whole_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine:
    """Slots of this machine: one node with all of them, or one node each for a policy that rents."""

    slots: int
    machine: MachineSpec = field(default_factory=MachineSpec)
    store: str = ""
    rents: bool = False

    words: ClassVar[str] = "this machine"
    mark: ClassVar[str] = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return neighbour_notes(live_runs(), self.devices, cores=len(os.sched_getaffinity(0)))

    @property
    def devices(self) -> tuple[str, ...]:
        """One for every slot: the name of a GPU, or an empty text for a core."""
        return find_slots(self.slots).devices

    @property
    def asked(self) -> Tables:
        return {"on": LOCAL, "slots": self.slots, "store": self.store or None}

    def check(self, work: RealWork) -> None:
        check_storable(work, self.store)

    @contextmanager
    def opened(self) -> Iterator[OpenTarget]:
        yield self

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (node_of(whole_machine(self.slots).id, self.slots),)

    @property
    def held(self) -> tuple[Node, ...]:
        return () if self.rents else self.nodes

    @property
    def to_measure_on(self) -> tuple[Node, ...]:
        return self.nodes

    @property
    def offer(self) -> Offer:
        return slots_offer(self.slots, self.machine)

    def make(self, training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        store = "" if training.temporary or not self.store else store_of(self.store, folder.name)
        check_tensorboard(training)
        return LocalSubstrate(
            spec_of=lambda job: training_job(training, job),
            run_dir=folder.path,
            slots=find_slots(training.slots),
            clock=clock,
            rules=Rules(retries=training.retries),
            files=JobFiles(tensorboard=training.tensorboard, store=store),
            runs_commands=training.runs_commands,
        )

    def scratch(self, purpose: str, log: Path | None) -> AbstractContextManager[RunFolder]:
        return scratch(purpose, log=log)

    def fleet(self, folder: RunFolder, purpose: str = "") -> NodeFleet | None:
        del folder, purpose
        return None

    def look_again(self) -> OpenTarget:
        return self


def this_machine(request: TargetRequest) -> ThisMachine:
    """This machine with the slots that were asked for."""
    return ThisMachine(
        slots=check_slots(request.wanted_slots),
        machine=request.machine,
        store=request.store,
        rents=request.rents,
    )


def check_slots(slots: int | None) -> int:
    """This many slots; None: one for every usable GPU of this machine, or for every core if it has none."""
    return len(find_slots()) if slots is None else check_slot_count(slots)
