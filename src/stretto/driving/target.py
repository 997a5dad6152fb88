"""What a run is put on, its target: this machine or a Ray cluster; and where its files may go.

STORE/RUN/id          the same as in the run's folder
STORE/RUN/jobs/ID/    the checkpoints of a job
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.resources import Resources
from stretto.driving.drive import RealSubstrate
from stretto.driving.stop import Stop, listening
from stretto.driving.substrate import TrainingSpec, count_slots, make_substrate
from stretto.inputs.cluster import MOST_SLOTS, MachineSpec, slots_offer
from stretto.inputs.study import Rented
from stretto.inputs.work import Entry, RealWork
from stretto.pricing.instances import Offer
from stretto.runs.begin import check_room
from stretto.runs.folder import RunFolder, Tables
from stretto.runs.status import live_runs, neighbour_notes
from stretto.runs.store import store_of
from stretto.substrate.fleet.provision import NodeFleet
from stretto.substrate.local.slots import find_slots, whole_machine
from stretto.system.private_files import make_private_folder
from stretto.wire.store_url import check_store


@contextmanager
def scratch(purpose: str, *, log: Path | None = None, parent: Path | None = None) -> Iterator[RunFolder]:
    """The folder of a run that is thrown away, however the block ends, also by a signal.

    Where an InputError names the log of a training that failed, that is kept as `log`, and the error then
    names this. The folder is in `parent`, else where such things usually are.
    """
    stop = Stop()
    stop.impatient = True
    with (
        listening(stop),
        tempfile.TemporaryDirectory(
            prefix=f"stretto-{purpose}-", dir=parent, ignore_cleanup_errors=True
        ) as folder,
    ):
        try:
            check_room(Path(folder).parent)
            yield RunFolder(Path(folder))
        except InputError as error:
            raise _with_log_at(log, error, Path(folder)) from error


def _with_log_at(place: Path | None, error: InputError, folder: Path) -> InputError:
    """The same error, once the log that it names lies there; it names nothing that is thrown away."""
    where, log = "" if error.where == str(folder) else error.where, error.log
    if log and Path(log).is_relative_to(folder):
        log = kept_log(Path(log), place)
    return InputError(error.problem, where=where, remedy=error.remedy, log=log)


def kept_log(log: Path, place: Path | None) -> str:
    """Where the log of training that was only tried lies from now on; empty: it could not be kept."""
    if place is None:
        return ""
    try:
        make_private_folder(place.parent)
        shutil.move(log, place)
    except OSError:  # what is wrong with the training is the news, not this
        return ""
    return str(place)


LOCAL = "local"
RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """Where a run is to be."""

    on: str = LOCAL
    """`local`, `ray` or `ray:ADDRESS`."""
    slots: int | None = None
    """Workers at once; None: as the file says, or as many as there are."""
    store: str = ""
    """Where checkpoints go besides the run's folder: a path or URL that fsspec knows; empty: nowhere."""
    runs: Path
    machine: MachineSpec
    rents: bool = False
    """The policy wishes for the nodes it needs."""
    rented: Rented | None = None
    """What can be rented on a Ray cluster, besides what is there."""


class OpenTarget(Protocol):
    """A target that is there."""

    @property
    def words(self) -> str:
        """What it is called in a sentence."""

    @property
    def mark(self) -> str:
        """What tells measurements made here from others; empty on this machine."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """That are there."""

    @property
    def held(self) -> tuple[Node, ...]:
        """Those of them that a run has from its start; the others it must wish for."""

    @property
    def to_measure_on(self) -> tuple[Node, ...]:
        """Those of them that nobody pays for by the hour: not what some run has brought up."""

    @property
    def offer(self) -> Offer:
        """What a study's policy is told that there is."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of it."""

    def make(self, training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        """The substrate of a run in a folder."""

    def scratch(self, purpose: str, log: Path | None) -> AbstractContextManager[RunFolder]:
        """A folder for what is only tried, which is thrown away; `log` is where that of a failure is kept."""

    def fleet(self, folder: RunFolder, purpose: str = "") -> NodeFleet | None:
        """Who brings up nodes for the run in a folder; None where nobody does.

        `purpose` tells these nodes from others of the run, by their names.
        """


class Target(Protocol):
    """A target as it was asked for."""

    @property
    def asked(self) -> Tables:
        """What must be the same for a run to be resumed."""

    def check(self, work: RealWork) -> None:
        """InputError if that cannot be done there."""

    def opened(self) -> AbstractContextManager[OpenTarget]:
        """Have it for as long as the block runs; within another such block, go on with the same."""


def find_target(request: TargetRequest) -> Target:
    """The target that was asked for; nothing is started or connected to."""
    if request.store:
        check_store(request.store)
    kind, _, address = request.on.partition(":")
    if request.on == LOCAL:
        return ThisMachine(
            slots=check_slots(_slots(request)),
            machine=request.machine,
            store=request.store,
            rents=request.rents,
        )
    if kind == RAY and (address or request.on == RAY):
        if request.slots is not None:
            check_slots(request.slots)
        from stretto.driving.ray_target import RayCluster  # noqa: PLC0415 - only who asks for it needs it

        return RayCluster(request, address or None)
    raise InputError(f"{request.on!r} is no place to train.", remedy="Give local, ray or ray:ADDRESS.")


def local_devices(target: Target) -> tuple[str, ...]:
    """What a run there trains on that is this machine's; nothing on a cluster, which keeps its own books."""
    return target.devices if isinstance(target, ThisMachine) else ()


def node_of(name: str, slots: int) -> Node:
    """A node with so many slots, as the journal will have it: its numbers are floats."""
    return Node(name, Resources(gpu=float(slots)))


def _slots(request: TargetRequest) -> int | None:
    return request.slots if request.slots is not None else request.machine.slots


def check_slots(slots: int | None) -> int:
    """So many slots, or as many as the machine has."""
    if slots is None:
        return count_slots()
    if not 1 <= slots <= MOST_SLOTS:
        raise InputError(f"{slots} slots are out of range.", remedy=f"Give 1 to {MOST_SLOTS}.")
    return slots


def check_storable(work: RealWork, store: str) -> None:
    """InputError if a store is given for what cannot use it."""
    if store and not isinstance(work, Entry):
        raise InputError(
            "--store is for training functions; a command keeps its own checkpoints.", remedy="Leave it out."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine:
    """Slots of this machine: one node of all of them, or one for each to a policy that rents."""

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
        """One for every slot: a GPU's name, or nothing for a core."""
        return find_slots(self.slots).devices

    @property
    def asked(self) -> Tables:
        return {"on": LOCAL, "slots": self.slots, "store": self.store or None}

    def check(self, work: RealWork) -> None:
        check_storable(work, self.store)

    @contextmanager
    def opened(self) -> Iterator[OpenTarget]:
        """It is always there."""
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
        return make_substrate(training, folder, clock, store)

    def scratch(self, purpose: str, log: Path | None) -> AbstractContextManager[RunFolder]:
        return scratch(purpose, log=log)

    def fleet(self, folder: RunFolder, purpose: str = "") -> NodeFleet | None:
        del folder, purpose
        return None
