"""Where a run trains: what is asked for, and what this machine and a Ray cluster both offer.

A `Target` is what was asked for; `Target.opened()` connects to it and gives an `OpenTarget`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.resources import Resources
from stretto.driving.drive import RealSubstrate
from stretto.driving.stop import Stop, listening
from stretto.driving.substrate import TrainingSpec
from stretto.inputs.cluster import MOST_SLOTS, MachineSpec
from stretto.inputs.study import Rented
from stretto.inputs.work import Entry, RealWork
from stretto.pricing.instances import Offer
from stretto.runs.begin import check_room
from stretto.runs.folder import RunFolder, Tables
from stretto.substrate.fleet.provision import NodeFleet
from stretto.system.private_files import make_private_folder

LOCAL = "local"
RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """Where a run is to train."""

    on: str = LOCAL
    """`local`, `ray` or `ray:ADDRESS`."""
    slots: int | None = None
    """Workers at once; None: as the file says, or one for every GPU or core."""
    store: str = ""
    """A second place for checkpoints: a path or URL that fsspec knows; empty: none."""
    runs: Path
    machine: MachineSpec
    rents: bool = False
    """The policy requests the nodes that it needs."""
    rented: Rented | None = None
    """The nodes that can be rented on a Ray cluster, in addition to those that are there."""

    @property
    def wanted_slots(self) -> int | None:
        """As the command line says, else as the file says; None: neither does."""
        return self.machine.slots if self.slots is None else self.slots


class OpenTarget(Protocol):
    """A target that is ready for use."""

    @property
    def words(self) -> str:
        """Its name in a sentence."""

    @property
    def mark(self) -> str:
        """A suffix for the names of profiles that are measured here; empty on this machine."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that are there."""

    @property
    def held(self) -> tuple[Node, ...]:
        """The nodes that a run has from its start; it must request any others."""

    @property
    def to_measure_on(self) -> tuple[Node, ...]:
        """The nodes that cost nothing extra: none that some run has launched."""

    @property
    def offer(self) -> Offer:
        """What a study's policy may use."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the run starts."""

    def make(self, training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        """The substrate of the run in a folder."""

    def scratch(self, purpose: str, log: Path | None) -> AbstractContextManager[RunFolder]:
        """A temporary folder for a probe; the log of a training that fails there is kept as `log`."""

    def fleet(self, folder: RunFolder, purpose: str = "") -> NodeFleet | None:
        """Launches nodes for the run in a folder; None if this target launches none.

        `purpose` becomes part of the nodes' names.
        """

    def look_again(self) -> OpenTarget:
        """The same target with the nodes that are there now."""


class Target(Protocol):
    """A target that was asked for."""

    @property
    def asked(self) -> Tables:
        """The settings that must be equal for a run to be resumed."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this machine that a run trains on; Ray keeps its own books."""

    def check(self, work: RealWork) -> None:
        """InputError if this work cannot run there."""

    def opened(self) -> AbstractContextManager[OpenTarget]:
        """Connects to the target while the block runs."""


def node_of(name: str, slots: int) -> Node:
    """A node with this many slots, as floats, as in the journal."""
    return Node(name, Resources(gpu=float(slots)))


def check_slot_count(slots: int) -> int:
    """The same number; InputError if it is out of range."""
    if not 1 <= slots <= MOST_SLOTS:
        raise InputError(f"{slots} slots are out of range.", remedy=f"Give 1 to {MOST_SLOTS}.")
    return slots


def check_storable(work: RealWork, store: str) -> None:
    """InputError if a store is given for a command, which keeps its own checkpoints."""
    if store and not isinstance(work, Entry):
        raise InputError(
            "--store is for training functions; a command keeps its own checkpoints.", remedy="Leave it out."
        )


@contextmanager
def scratch(purpose: str, *, log: Path | None = None, parent: Path | None = None) -> Iterator[RunFolder]:
    """A run's folder that is removed however the block ends, also by a signal.

    If an InputError names the log of a failed training, that file is moved to `log`, and the error names the
    new place. The folder is made in `parent`, else in the system's temporary folder.
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
    """The same error with the new place of its log; it names nothing in the temporary folder."""
    where, log = "" if error.where == str(folder) else error.where, error.log
    if log and Path(log).is_relative_to(folder):
        log = kept_log(Path(log), place)
    return InputError(error.problem, where=where, remedy=error.remedy, log=log)


def kept_log(log: Path, place: Path | None) -> str:
    """Moves the log of a probe to its place and names that; empty if that was impossible."""
    if place is None:
        return ""
    try:
        make_private_folder(place.parent)
        shutil.move(log, place)
    except OSError:  # the error of the training matters more
        return ""
    return str(place)
