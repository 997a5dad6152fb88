"""Worker processes: which wait for a slot, where they run, and how they are reached."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stretto.substrate.elastic.effects import WorkerExit
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.system.limits import SCARCE, Retry, limit_text, scarce_number
from stretto.wire.channel import Channel, Listener
from stretto.wire.messages import Finished, FromWorker, Left, Message, Task, ToWorker

_LAST_WORDS_S = 1.0
"""How long after a worker's end its connection may still deliver messages."""

_FORK_SERVER_ENDED = (
    "the process that starts its workers has ended; nursery.log in the run's folder may say why"
)

Post = Callable[[Callable[[], None]], None]
"""Runs a step in the substrate's one thread."""


class WorkerObserver(Protocol):
    """Receives news of workers: they start, report, end or cannot start."""

    def seated(self, worker_id: str) -> None: ...
    def born(self, worker_id: str) -> None: ...
    def noted(self, worker_id: str, text: str) -> None: ...
    def heard(self, worker_id: str, message: FromWorker) -> None: ...
    def confused(self, worker_id: str, why: str) -> None: ...
    def gone(self, worker_id: str, how: WorkerExit) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A slot for one worker."""

    name: str
    """Unique."""
    home: str
    """The same for all places whose processes share a fork server."""
    env: Mapping[str, str]
    stays: bool
    """Whether a process whose task ended well may wait here for another task. It then holds no GPU."""
    scratch: Path | None = None
    """The folder for the files of jobs on this node, if it is not the run's."""
    command_env: Mapping[str, str] | None = None
    """The environment of a worker that runs a command, if it differs from `env`."""


class ForkServerHandle(Protocol):
    """A process from which workers are forked."""

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None: ...
    def end(self, worker: str) -> None: ...
    def kill(self, worker: str) -> None: ...
    def close(self) -> None: ...
    def wait(self, patience_s: float) -> None: ...


class WorkerGround(Protocol):
    """Where workers run: this machine, or the nodes of a cluster. Called in one thread only."""

    @property
    def host(self) -> str:
        """The address of the controller, as workers see it."""

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        """Ask for a place on a node; on any node if that is empty."""

    def withdraw(self, worker_id: str) -> bool:
        """Take back a request. Returns whether the worker was still waiting."""

    def grants(self) -> list[tuple[str, Place]]:
        """Workers that can be placed now, and where."""

    def give_back(self, worker_id: str) -> None: ...

    def abandoned(self) -> list[str]:
        """Names of places that are gone since the last call. Idle processes there must end."""

    def fork_server(
        self, home: str, entry: str, on_news: Callable[[WorkerNews], None], on_end: Callable[[], None]
    ) -> ForkServerHandle:
        """The fork server of one home and entry. Its callbacks may run in any thread."""


@dataclass(slots=True)
class _Hand:
    """A worker that was asked for, or that runs."""

    task: Task
    log: Path
    process: str
    """The name of its process, which may have run earlier workers."""
    place: Place | None = None
    fork_server: ForkServerHandle | None = None
    channel: Channel | None = None
    born: bool = False
    """Whether its process runs."""
    unwanted: bool = False
    """Whether it was told to end."""
    retry: Retry | None = None
    """When its start is tried again, after a limit of the machine prevented it."""
    waits: bool = False
    """Whether it waits for that."""
    how: WorkerExit | None = None
    """How its process ended, while its last messages may still arrive."""
    gone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Idle:
    """A process that has done its task and waits for another task of the same entry."""

    process: str
    entry: str
    fork_server: ForkServerHandle
    channel: Channel


class Workers:
    """All worker processes of a run. Called in one thread only; other threads post to it.

    A process whose task ended well may stay in its place for the next task of the same entry.
    """

    def __init__(self, *, ground: WorkerGround, grace_s: float, post: Post, overseer: WorkerObserver) -> None:
        self._ground = ground
        self._grace_s = grace_s
        self._post = post
        self._overseer = overseer
        self._hands: dict[str, _Hand] = {}
        self._player_of: dict[str, str] = {}
        """The worker that each process is at present."""
        self._idle: dict[str, _Idle] = {}
        """By the name of the place."""
        self._fork_servers: dict[tuple[str, str], ForkServerHandle] = {}
        """By home and entry."""
        self._noted: set[str] = set()
        """Notes about how workers start, each given to the user once."""
        self._secret = secrets.token_hex(32)
        self._listener = Listener(self._secret, self, ground.host)

    def spawn(self, worker_id: str, node: str, task: Task, log: Path) -> None:
        """Start a worker as soon as there is a place on the node."""
        self._hands[worker_id] = _Hand(task, log, process=worker_id)
        self._ground.ask(worker_id, task.job_id, node)

    def end(self, worker_id: str, *, at_once: bool) -> None:
        hand = self._hands.get(worker_id)
        if hand is None:
            return
        if (
            self._ground.withdraw(worker_id) or hand.place is None or hand.waits
        ):  # its node may be gone before it had one
            self._forget(worker_id, WorkerExit(None, "it was never started"))
        elif hand.fork_server is not None and hand.how is None:
            hand.unwanted = True
            if hand.born:
                (hand.fork_server.kill if at_once else hand.fork_server.end)(hand.process)
            else:  # its fork server still imports the training code: there is nothing to save, or to wait for
                hand.fork_server.kill(hand.process)
                self._forget(worker_id, WorkerExit(None, "it was never started"))

    def send(self, worker_id: str, message: ToWorker) -> None:
        """Nothing happens if the worker is gone."""
        hand = self._hands.get(worker_id)
        if hand is not None and hand.channel is not None:
            hand.channel.send(message)

    def place(self) -> None:
        """Start the workers that have a place now."""
        self._start_again()
        for name in self._ground.abandoned():
            if (left := self._idle.pop(name, None)) is not None:
                left.fork_server.end(left.process)
        for worker_id, place in self._ground.grants():
            hand = self._hands[worker_id]
            hand.place = place
            hand.task = replace(hand.task, stays=place.stays)
            if place.scratch is not None:
                folder = place.scratch / "jobs" / hand.task.job_id
                hand.task = replace(hand.task, folder=str(folder))
                hand.log = folder / hand.log.name
            self._overseer.seated(worker_id)
            idle = self._idle.pop(place.name, None)
            if idle is not None and idle.entry == hand.task.entry:
                self._reuse(worker_id, hand, idle)
                continue
            if idle is not None:
                idle.fork_server.end(idle.process)
            self._start(worker_id, hand, place)

    def lose_home(self, home: str, why: str) -> None:
        """All workers of a home are gone, although no message says so."""
        for key in [key for key in self._fork_servers if key[0] == home]:
            self._lose_fork_server(key, why)

    def _start(self, worker_id: str, hand: _Hand, place: Place) -> None:
        try:
            hand.fork_server = self._fork_server(place.home, hand.task.entry)
        except (OSError, RuntimeError) as error:
            self._cannot_start(worker_id, f"a worker cannot be started: {error}", scarce_number(error))
            return
        self._player_of[hand.process] = worker_id
        hand.fork_server.spawn(
            hand.process,
            address=self._listener.address,
            secret=self._secret,
            log=hand.log,
            env=place.env if place.command_env is None or not hand.task.command else place.command_env,
        )

    def _cannot_start(self, worker_id: str, why: str, number: int | None) -> None:
        """Try again in the same place if only a limit of the machine prevented the start."""
        hand = self._hands[worker_id]
        retry = None if number is None else Retry.at(time.monotonic(), hand.retry)
        if number is None or retry is None:
            reached = "" if number is None else f": {limit_text(number)}"
            self._gone(worker_id, WorkerExit(None, f"{why}{reached}"))
            return
        hand.retry, hand.waits = retry, True
        text = f"a worker cannot be started: {limit_text(number)}. It waits and is tried again"
        if text not in self._noted:
            self._noted.add(text)
            self._overseer.noted(worker_id, text)

    def _start_again(self) -> None:
        now_s = time.monotonic()
        for worker_id, hand in list(self._hands.items()):
            if (
                hand.waits
                and hand.retry is not None
                and hand.place is not None
                and hand.retry.again_s <= now_s
            ):
                hand.waits = False
                self._start(worker_id, hand, hand.place)

    def _reuse(self, worker_id: str, hand: _Hand, idle: _Idle) -> None:
        hand.process, hand.fork_server, hand.channel = idle.process, idle.fork_server, idle.channel
        hand.born = True
        self._player_of[idle.process] = worker_id
        self._overseer.born(worker_id)
        idle.channel.send(hand.task)

    def forget_silent(self, awake_s: float) -> None:
        """Give up waiting for the last messages: a process left behind may hold the connection open."""
        for worker_id, hand in list(self._hands.items()):
            if hand.how is not None:
                hand.gone_s = hand.gone_s or awake_s
                if awake_s - hand.gone_s > _LAST_WORDS_S:
                    self._forget(worker_id, hand.how)

    def close(self) -> None:
        """End everything that is left, and wait for it."""
        self._drop_idle(lambda _: True)  # they leave when the connection ends
        fork_servers = list(self._fork_servers.values())
        for fork_server in fork_servers:
            fork_server.close()
        end_s = time.monotonic() + 2 * self._grace_s
        for fork_server in fork_servers:
            fork_server.wait(max(end_s - time.monotonic(), 0.0))
        self._listener.close()

    def _fork_server(self, home: str, entry: str) -> ForkServerHandle:
        key = (home, entry)
        if key not in self._fork_servers:
            self._fork_servers[key] = self._ground.fork_server(
                home,
                entry,
                lambda news: self._post(lambda: self._hear_fork_server(news)),
                lambda: self._post(lambda: self._lose_fork_server(key, _FORK_SERVER_ENDED)),
            )
        return self._fork_servers[key]

    def _hear_fork_server(self, news: WorkerNews) -> None:
        if news.kind == "ready":
            return
        worker_id = self._player_of.get(news.worker)
        if news.kind == "note":
            if worker_id is not None and news.text not in self._noted:  # every node says it
                self._noted.add(news.text)
                self._overseer.noted(worker_id, news.text)
            return
        if news.kind == "born":
            if worker_id is not None:
                self._hands[worker_id].born = True
                self._overseer.born(worker_id)
            return
        if worker_id is None:
            self._drop_idle(lambda idle: idle.process == news.worker)
        elif news.kind == "gone" and news.number in SCARCE and not self._hands[worker_id].born:
            del self._player_of[news.worker]
            self._cannot_start(worker_id, news.error, news.number)
        elif news.kind == "gone":
            self._gone(worker_id, WorkerExit(news.code, news.error))
        else:
            self._gone(worker_id, WorkerExit(None, news.error, final=True))

    def _drop_idle(self, unwanted: Callable[[_Idle], bool]) -> None:
        for place, idle in list(self._idle.items()):
            if unwanted(idle):
                del self._idle[place]
                idle.channel.hang_up()

    def _lose_fork_server(self, key: tuple[str, str], why: str) -> None:
        fork_server = self._fork_servers.pop(key, None)
        if fork_server is None:
            return  # its home was lost before
        for worker_id, hand in list(self._hands.items()):
            if hand.fork_server is fork_server and hand.how is None:
                self._gone(worker_id, WorkerExit(None, why))
        self._drop_idle(lambda idle: idle.fork_server is fork_server)

    def _gone(self, worker_id: str, how: WorkerExit) -> None:
        """Its last messages may still be on their way, so wait for the end of the connection."""
        hand = self._hands[worker_id]
        hand.how = how
        if hand.channel is None:
            self._forget(worker_id, how)

    def _forget(self, worker_id: str, how: WorkerExit) -> None:
        hand = self._hands.pop(worker_id)
        self._player_of.pop(hand.process, None)  # not before: its last messages may come after its end
        if hand.channel is not None:
            hand.channel.hang_up()
        self._ground.give_back(worker_id)
        self._overseer.gone(worker_id, how)

    # Called in the listener's thread

    def connected(self, channel: Channel) -> None:
        self._post(lambda: self._connected(channel))

    def heard(self, channel: Channel, message: Message) -> None:
        self._post(lambda: self._heard(channel.worker, message))

    def hung_up(self, channel: Channel, why: str) -> None:
        self._post(lambda: self._hung_up(channel, why and f"a worker makes no sense: {why}"))

    # What follows from that

    def _connected(self, channel: Channel) -> None:
        hand = self._hand_of(channel.worker)
        if hand is None or hand.channel is not None:
            channel.hang_up()
            return
        hand.channel = channel
        channel.send(hand.task)

    def _heard(self, process: str, message: Message) -> None:
        worker_id = self._player_of.get(process)
        if worker_id is None or worker_id not in self._hands or isinstance(message, ToWorker):
            return
        self._overseer.heard(worker_id, message)
        hand = self._hands.get(worker_id)
        if hand is not None and hand.task.stays and isinstance(message, Finished | Left):
            self._let_rest(worker_id, hand, message)

    def _let_rest(self, worker_id: str, hand: _Hand, last_word: Finished | Left) -> None:
        """The worker is gone; its process stays, unless it is about to end."""
        leaves = last_word.leaves or hand.unwanted or hand.how is not None
        if leaves or hand.fork_server is None or hand.channel is None or hand.place is None:
            return
        del self._hands[worker_id], self._player_of[hand.process]
        self._idle[hand.place.name] = _Idle(hand.process, hand.task.entry, hand.fork_server, hand.channel)
        self._ground.give_back(worker_id)
        self._overseer.gone(worker_id, WorkerExit(0))

    def _hand_of(self, process: str) -> _Hand | None:
        worker_id = self._player_of.get(process)
        return None if worker_id is None else self._hands.get(worker_id)

    def _hung_up(self, channel: Channel, why: str) -> None:
        channel.hang_up()
        worker_id = self._player_of.get(channel.worker, "")
        hand = self._hands.get(worker_id)
        if hand is None or hand.channel is not channel:
            self._drop_idle(lambda idle: idle.channel is channel)
            return
        if why:
            self._overseer.confused(worker_id, why)
        hand.channel = None
        if hand.how is not None:
            self._forget(worker_id, hand.how)
