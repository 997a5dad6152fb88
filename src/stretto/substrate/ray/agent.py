"""What runs on a node of the cluster: an actor with the fork servers that start the node's workers.

Training code runs only in the worker processes, never in Ray's own. As on one machine, they end with their
process group: on request, when the agent is gone, or when the run is over.
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
from stretto.substrate.elastic.fork_servers import (
    NO_ENTRY,
    ForkServerProcess,
    Trainer,
    WorkerNews,
    trainer_of,
    training_env,
)
from stretto.substrate.ray.log_shipping import LogPiece, LogShipper
from stretto.substrate.ray.placement import LeaseHolder
from stretto.system.identity import RunLock
from stretto.system.limits import scarce_number
from stretto.system.private_files import make_private_folder
from stretto.wire.checkpoints import UNCOPIED

_SIOCGIFADDR = 0x8915
LISTEN_S = 0.5
"""How long the controller's poll for news stays open."""
_PATIENCE_S = 5.0
"""Processes of an earlier start of the run may take this much longer than the grace period to end."""
_BATCH_S = 0.02
"""Messages that follow within this time are delivered together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent needs to know about the run and its node."""

    run: str
    scratch: Path
    """The run's folder on the node's own disk."""
    folder: Path | None
    """The run's shared folder, which the node must see. None: jobs keep their files in `scratch`."""
    proof: str
    """The content of the file `id` in the run's folder."""
    host: str
    """The address at which other nodes reach this one."""
    trainer: Trainer
    grace_s: float
    command_grace_s: float
    """For workers that run a command."""
    slots: int
    cwd: Path
    """The controller's working directory, so that relative paths in training code mean the same here."""
    env: Mapping[str, str]
    runs_commands: bool = False
    """Commands need `cwd` on the node, and keep all their files in the run's folder."""


@dataclass(frozen=True, slots=True)
class ForkServerMessage:
    """What a fork server reports about one of its workers; without a saying: the server has ended."""

    entry: str
    saying: WorkerNews | None


@dataclass(frozen=True, slots=True)
class AgentNews:
    """What happened on a node since the last poll."""

    messages: tuple[ForkServerMessage, ...] = ()
    pieces: tuple[LogPiece, ...] = ()


class ForkServerAction(Enum):
    """What a fork server can be asked to do."""

    WARM = auto()
    SPAWN = auto()
    END = auto()
    KILL = auto()
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The connection, log file and environment of a new worker."""

    address: str
    secret: str
    log: Path
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """One order to a fork server. The orders of an agent are numbered without gaps."""

    number: int
    entry: str
    action: ForkServerAction
    worker: str = ""
    start: WorkerStart | None = None


class Agent(LeaseHolder):
    """A Ray actor: one thread carries out orders, one waits for news, and one per lease holds it."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self._config = config
        self._folder = config.folder or config.scratch
        self._lock: RunLock | None = None
        self._shipper: LogShipper | None = None
        self._env: dict[str, str] = {}
        self._fork_servers: dict[str, ForkServerProcess] = {}
        self._news: queue.SimpleQueue[ForkServerMessage] = queue.SimpleQueue()
        self._ordering = threading.Lock()
        """Guards the fields below."""
        self._waiting: dict[int, AgentOrder] = {}
        self._next = 0
        self._begins = False
        self._cleans_up = False
        self._begun = threading.Event()
        """Set when `begin` has ended, with or without success."""

    def begin(self) -> None:
        """Check that the node is fit for the run, then carry out the orders that came meanwhile."""
        with self._ordering:
            self._begins = not self._cleans_up
        try:
            if self._begins:
                self._set_up()
        finally:
            self._begun.set()

    def _set_up(self) -> None:
        config = self._config
        if config.folder is not None:
            _check_folder(config.folder, config)
        config.scratch.mkdir(mode=0o700, exist_ok=True)
        if config.scratch.stat().st_uid != os.getuid():
            raise InputError(
                f"{config.scratch} on node {config.host} belongs to another user.", remedy="Remove it."
            )
        _enter(config)
        self._shipper = None if config.folder is not None else LogShipper(config.scratch)
        self._env = {
            **os.environ,
            **training_env(threads=max((os.cpu_count() or 1) // config.slots, 1), grace_s=config.grace_s),
            **_network(config.host),
            **config.env,
        }
        lock = RunLock(config.scratch / "lock", patience_s=config.command_grace_s + _PATIENCE_S)
        with self._ordering:
            self._lock = lock
            self._run_ready_orders()

    def order(self, order: AgentOrder) -> None:
        with self._ordering:
            self._waiting[order.number] = order
            if self._lock is not None:
                self._run_ready_orders()

    def _run_ready_orders(self) -> None:
        """Carry out orders by number; Ray may deliver them in another sequence."""
        while self._next in self._waiting:
            order = self._waiting.pop(self._next)
            self._next += 1
            try:
                self._run(order)
            except Exception as error:  # noqa: BLE001 - a failed order must not stop the others
                why, number = f"a worker cannot be started: {error}", scarce_number(error) or 0
                gone = WorkerNews("gone", order.worker, error=why, number=number)
                self._news.put(ForkServerMessage(order.entry, gone))

    def listen(self) -> AgentNews:
        """Wait a moment for news; empty if nothing happens."""
        messages: list[ForkServerMessage] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._news.get(timeout=LISTEN_S))
            while True:
                messages.append(self._news.get(timeout=_BATCH_S))
        return AgentNews(tuple(messages), () if self._shipper is None else self._shipper.pieces())

    def remaining_logs(self) -> tuple[LogPiece, ...]:
        """The next pieces of logs. Asking again confirms that the previous ones have arrived."""
        return () if self._shipper is None else self._shipper.pieces()

    def clean_up(self) -> None:
        """Remove the scratch folder, unless it holds checkpoints that could not be copied elsewhere."""
        with self._ordering:
            self._cleans_up = True
            begins = self._begins
        ours = begins and self._begun.wait(_PATIENCE_S) and self._lock is not None
        if ours and not any(self._config.scratch.glob(f"jobs/*/*/{UNCOPIED}")):
            shutil.rmtree(self._config.scratch, ignore_errors=True)

    def _run(self, order: AgentOrder) -> None:
        server = self._fork_servers.get(order.entry)
        if order.action is ForkServerAction.SPAWN:
            self._spawn(order)
        elif order.action is ForkServerAction.WARM:
            with contextlib.suppress(OSError):  # SPAWN tries again
                self._fork_server(order.entry)
        elif server is None:
            return  # it has ended, and its workers with it
        elif order.action is ForkServerAction.END:
            server.end(order.worker)
        elif order.action is ForkServerAction.KILL:
            server.kill(order.worker)
        else:
            server.close()

    def _spawn(self, order: AgentOrder) -> None:
        start = order.start
        assert start is not None
        make_private_folder(start.log.parent)
        self._fork_server(order.entry).spawn(
            order.worker, address=start.address, secret=start.secret, log=start.log, env=start.env
        )

    def _fork_server(self, entry: str) -> ForkServerProcess:
        assert self._lock is not None
        if entry not in self._fork_servers:
            self._fork_servers[entry] = ForkServerProcess(
                entry,
                trainer_of(entry, self._config.trainer),
                grace_s=self._config.command_grace_s if entry == NO_ENTRY else self._config.grace_s,
                env=self._env,
                log=self._folder / "nursery.log",
                lock_fd=self._lock.fd,
                on_news=lambda news: self._news.put(ForkServerMessage(entry, news)),
                on_end=lambda: self._lose(entry),
            )
        return self._fork_servers[entry]

    def _lose(self, entry: str) -> None:
        with self._ordering:
            del self._fork_servers[entry]
            self._news.put(ForkServerMessage(entry, None))


def _check_folder(folder: Path, config: AgentConfig) -> None:
    with contextlib.suppress(OSError):
        if (folder / "id").read_text(encoding="ascii") == config.proof:
            return
    store = ", or give --store with a place that all of them can reach, such as s3://bucket/run"
    raise InputError(
        f"node {config.host} does not see the run's folder {folder}.",
        remedy=f"Run in a folder that all nodes share{'' if config.runs_commands else store}.",
    )


def _enter(config: AgentConfig) -> None:
    """Change to the controller's folder. Only commands require it: training code is found by its path."""
    try:
        os.chdir(config.cwd)
    except OSError as error:
        if config.runs_commands:
            raise InputError(
                f"node {config.host} does not see the command's folder {config.cwd} ({error.strerror}).",
                remedy="Start it in a folder that all nodes share.",
            ) from error


def _network(host: str) -> dict[str, str]:
    """The network address and interface for talking to other nodes, unless the user has set them."""
    found = {"STRETTO_HOST": host}
    interface = _interface_of(host)
    if interface:
        found.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface))
    return {name: value for name, value in found.items() if name not in os.environ}


def _interface_of(host: str) -> str:
    """The network interface that has this address; empty if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return ""
