"""What runs on a node of the cluster: an actor with the nurseries that fork the node's workers.

Everything that touches training code is in those processes, not in Ray's: they end as on one machine, with
their group, when they are told to, when the agent is gone, or when the run is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from stretto.core.errors import InputError
from stretto.substrate.elastic.fork_servers import Nursery, Saying, Trainer, training_env
from stretto.substrate.elastic.identity import RunLock
from stretto.substrate.ray.log_shipping import Piece, Tail
from stretto.substrate.ray.placement import Sitter
from stretto.system.limits import scarce_number
from stretto.system.private_files import make_private_folder
from stretto.wire.store_url import UNCOPIED

_SIOCGIFADDR = 0x8915
LISTEN_S = 0.5
"""How long the controller's question whether there is news stays open."""
_PATIENCE_S = 5.0
"""How much longer than the grace what is left of an earlier start of the run may take to end."""
_AFTER_S = 0.02
"""What is said shortly after the first thing goes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What an agent is put in charge of."""

    run: str
    scratch: Path
    """The node's own, of this run."""
    folder: Path | None
    """The run's, which the node must see; None: its jobs have their files in the scratch folder."""
    proof: str
    """What stands in the file `id` of the run's folder."""
    host: str
    """Where other nodes find this one."""
    trainer: Trainer
    grace_s: float
    slots: int
    cwd: Path
    """The controller's: relative paths in training code mean the same here, if it exists."""
    env: Mapping[str, str]
    runs_commands: bool = False
    """Then the node must see that folder, too, and all that commands keep is in the run's."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a nursery said of one of its workers; or, without a saying, that it ended."""

    entry: str
    saying: Saying | None


@dataclass(frozen=True, slots=True)
class News:
    """What happened on a node since the last time."""

    said: tuple[Said, ...] = ()
    pieces: tuple[Piece, ...] = ()


class Do(Enum):
    """What a nursery can be told."""

    WARM = auto()
    SPAWN = auto()
    END = auto()
    KILL = auto()
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class Birth:
    """What a new worker is given."""

    address: str
    secret: str
    log: Path
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a nursery is to do; the numbers of an agent's orders have no gaps."""

    number: int
    entry: str
    do: Do
    worker: str = ""
    birth: Birth | None = None


class Agent(Sitter):
    """A Ray actor with two threads: one carries out orders, one waits for news. Others hold seats."""

    def __init__(self, charge: Charge) -> None:
        super().__init__()
        self._charge = charge
        self._folder = charge.folder or charge.scratch
        self._lock: RunLock | None = None
        self._tail: Tail | None = None
        self._env: dict[str, str] = {}
        self._nurseries: dict[str, Nursery] = {}
        self._news: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._ordering = threading.Lock()
        """Guards what follows."""
        self._waiting: dict[int, Order] = {}
        self._next = 0
        self._begins = False
        self._departs = False
        self._begun = threading.Event()
        """Whatever came of it."""

    def begin(self) -> None:
        """Make sure that this node is fit for the run; then do what was ordered meanwhile."""
        with self._ordering:
            self._begins = not self._departs
        try:
            if self._begins:
                self._settle_in()
        finally:
            self._begun.set()

    def _settle_in(self) -> None:
        charge = self._charge
        if charge.folder is not None:
            _check_folder(charge.folder, charge)
        charge.scratch.mkdir(mode=0o700, exist_ok=True)
        if charge.scratch.stat().st_uid != os.getuid():
            raise InputError(
                f"{charge.scratch} on node {charge.host} is somebody else's.", remedy="Remove it."
            )
        _enter(charge)
        self._tail = None if charge.folder is not None else Tail(charge.scratch)
        self._env = {
            **os.environ,
            **training_env(threads=max((os.cpu_count() or 1) // charge.slots, 1), grace_s=charge.grace_s),
            **_network(charge.host),
            **charge.env,
        }
        lock = RunLock(charge.scratch / "lock", patience_s=charge.grace_s + _PATIENCE_S)
        with self._ordering:
            self._lock = lock
            self._carry_on()

    def order(self, order: Order) -> None:
        with self._ordering:
            self._waiting[order.number] = order
            if self._lock is not None:
                self._carry_on()

    def _carry_on(self) -> None:
        """Ray may deliver orders in another sequence."""
        while self._next in self._waiting:
            order = self._waiting.pop(self._next)
            self._next += 1
            try:
                self._carry_out(order)
            except Exception as error:  # noqa: BLE001 - one that cannot be carried out must not stop the others
                why, number = f"a worker cannot be started: {error}", scarce_number(error) or 0
                gone = Saying("gone", order.worker, error=why, number=number)
                self._news.put(Said(order.entry, gone))

    def listen(self) -> News:
        """The next things that are said; nothing if it stays quiet for a moment."""
        said: list[Said] = []
        with contextlib.suppress(queue.Empty):
            said.append(self._news.get(timeout=LISTEN_S))
            while True:
                said.append(self._news.get(timeout=_AFTER_S))
        return News(tuple(said), () if self._tail is None else self._tail.pieces())

    def rest(self) -> tuple[Piece, ...]:
        """The next that is left to carry; what was given before counts as carried."""
        return () if self._tail is None else self._tail.pieces()

    def depart(self) -> None:
        """Leave nothing on the node but checkpoints that could not be copied and so are nowhere else."""
        with self._ordering:
            self._departs = True
            begins = self._begins
        ours = begins and self._begun.wait(_PATIENCE_S) and self._lock is not None
        if ours and not any(self._charge.scratch.glob(f"jobs/*/*/{UNCOPIED}")):
            shutil.rmtree(self._charge.scratch, ignore_errors=True)

    def _carry_out(self, order: Order) -> None:
        nursery = self._nurseries.get(order.entry)
        if order.do is Do.SPAWN:
            self._spawn(order)
        elif order.do is Do.WARM:
            with contextlib.suppress(OSError):  # it is tried again when it is needed
                self._nursery(order.entry)
        elif nursery is None:
            return  # it ended, and its workers with it
        elif order.do is Do.END:
            nursery.end(order.worker)
        elif order.do is Do.KILL:
            nursery.kill(order.worker)
        else:
            nursery.close()

    def _spawn(self, order: Order) -> None:
        birth = order.birth
        assert birth is not None
        make_private_folder(birth.log.parent)
        self._nursery(order.entry).spawn(
            order.worker, address=birth.address, secret=birth.secret, log=birth.log, env=birth.env
        )

    def _nursery(self, entry: str) -> Nursery:
        assert self._lock is not None
        if entry not in self._nurseries:
            self._nurseries[entry] = Nursery(
                entry,
                self._charge.trainer,
                grace_s=self._charge.grace_s,
                env=self._env,
                log=self._folder / "nursery.log",
                lock_fd=self._lock.fd,
                on_saying=lambda saying: self._news.put(Said(entry, saying)),
                on_end=lambda: self._lose(entry),
            )
        return self._nurseries[entry]

    def _lose(self, entry: str) -> None:
        with self._ordering:
            del self._nurseries[entry]
            self._news.put(Said(entry, None))


def _check_folder(folder: Path, charge: Charge) -> None:
    with contextlib.suppress(OSError):
        if (folder / "id").read_text(encoding="ascii") == charge.proof:
            return
    store = (
        ", or give --store with a place for checkpoints that all of them can reach, such as s3://bucket/run"
    )
    raise InputError(
        f"node {charge.host} does not see the run's folder {folder}.",
        remedy=f"Run in a folder that all nodes share{'' if charge.runs_commands else store}.",
    )


def _enter(charge: Charge) -> None:
    """Training code is found by its path, and may do without the folder."""
    try:
        os.chdir(charge.cwd)
    except OSError as error:
        if charge.runs_commands:
            raise InputError(
                f"node {charge.host} does not see {charge.cwd}, where the command is to run "
                f"({error.strerror}).",
                remedy="Start it in a folder that all nodes share.",
            ) from error


def _network(host: str) -> dict[str, str]:
    """Where the workers of a node meet those of others, unless somebody has said so."""
    found = {"STRETTO_HOST": host}
    interface = _interface_of(host)
    if interface:
        found.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface))
    return {name: value for name, value in found.items() if name not in os.environ}


def _interface_of(host: str) -> str:
    """The network interface that has this address; empty if it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return ""
