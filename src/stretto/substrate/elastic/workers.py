"""Worker processes: who waits for a place, who runs where, who can be talked to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stretto.substrate.elastic.effects import Exit
from stretto.substrate.elastic.fork_servers import Saying
from stretto.system.limits import SCARCE, Retry, limit_text, scarce_number
from stretto.wire.channel import Channel, Listener
from stretto.wire.messages import Finished, FromWorker, Left, Message, Task, ToWorker

_LAST_WORDS_S = 1.0
"""How long after a worker's end its connection may still bring something it said."""

_NURSERY_ENDED = "the process that starts its workers has ended; nursery.log in the run's folder may say why"

Post = Callable[[Callable[[], None]], None]
"""Has something done in the one thread where everything happens."""


class Overseer(Protocol):
    """Who is told about workers."""

    def seated(self, worker_id: str) -> None: ...
    def born(self, worker_id: str) -> None: ...
    def noted(self, worker_id: str, text: str) -> None: ...
    def heard(self, worker_id: str, message: FromWorker) -> None: ...
    def confused(self, worker_id: str, why: str) -> None: ...
    def gone(self, worker_id: str, how: Exit) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker may be."""

    name: str
    """Of this place only."""
    home: str
    """Of all places whose processes have one nursery."""
    env: Mapping[str, str]
    stays: bool
    """A process whose task ended well may wait here for another: it holds nothing that others need."""
    scratch: Path | None = None
    """Where jobs have their folders here, if not in the run's."""
    command_env: Mapping[str, str] | None = None
    """What a worker that runs a command is told instead of `env`, if that differs."""


class Nursery(Protocol):
    """Where processes are forked from."""

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None: ...
    def end(self, worker: str) -> None: ...
    def kill(self, worker: str) -> None: ...
    def close(self) -> None: ...
    def wait(self, patience_s: float) -> None: ...


class Ground(Protocol):
    """What workers stand on: this machine, or the nodes of a cluster. Called in one thread only."""

    @property
    def host(self) -> str:
        """Where workers find the controller."""

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        """For a place on a node; anywhere if that is empty."""

    def withdraw(self, worker_id: str) -> bool:
        """Whether it was still waiting."""

    def grants(self) -> list[tuple[str, Place]]:
        """Whoever can be placed now, and where."""

    def give_back(self, worker_id: str) -> None: ...

    def abandoned(self) -> list[str]:
        """Names of places that are no more since this was last asked; whoever waits there is to go."""

    def nursery(
        self, home: str, entry: str, on_saying: Callable[[Saying], None], on_end: Callable[[], None]
    ) -> Nursery:
        """For all places of one home. It says what happens to its processes, from any thread."""


@dataclass(slots=True)
class _Hand:
    """One worker that is wanted or there."""

    task: Task
    log: Path
    process: str
    """What its process is called, which may have served others before."""
    place: Place | None = None
    nursery: Nursery | None = None
    channel: Channel | None = None
    born: bool = False
    """Its process is there."""
    unwanted: bool = False
    """It was told to end."""
    retry: Retry | None = None
    """A limit of the machine kept it from being started: when that is tried again."""
    waits: bool = False
    """It does so until then."""
    how: Exit | None = None
    """How its process ended, while its last words are waited for."""
    gone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Idle:
    """A process that has done its task and waits for another of the same entry."""

    process: str
    entry: str
    nursery: Nursery
    channel: Channel


class Workers:
    """All worker processes of a run. Called in one thread only; what others notice is posted there.

    A process whose task ended well may stay where it is for the next task of the same entry.
    """

    def __init__(self, *, ground: Ground, grace_s: float, post: Post, overseer: Overseer) -> None:
        self._ground = ground
        self._grace_s = grace_s
        self._post = post
        self._overseer = overseer
        self._hands: dict[str, _Hand] = {}
        self._player_of: dict[str, str] = {}
        """Which worker a process is at present."""
        self._idle: dict[str, _Idle] = {}
        """By the name of their place."""
        self._nurseries: dict[tuple[str, str], Nursery] = {}
        """By home and entry."""
        self._noted: set[str] = set()
        """What users were told of how workers are started."""
        self._secret = secrets.token_hex(32)
        self._listener = Listener(self._secret, self, ground.host)

    def spawn(self, worker_id: str, node: str, task: Task, log: Path) -> None:
        """As soon as there is a place on the node."""
        self._hands[worker_id] = _Hand(task, log, process=worker_id)
        self._ground.ask(worker_id, task.job_id, node)

    def end(self, worker_id: str, *, at_once: bool) -> None:
        hand = self._hands.get(worker_id)
        if hand is None:
            return
        if (
            self._ground.withdraw(worker_id) or hand.place is None or hand.waits
        ):  # its node may be gone before it had one
            self._forget(worker_id, Exit(None, "it was never started"))
        elif hand.nursery is not None and hand.how is None:
            hand.unwanted = True
            if hand.born:
                (hand.nursery.kill if at_once else hand.nursery.end)(hand.process)
            else:  # its nursery still imports the training code: there is nothing to save, or to wait for
                hand.nursery.kill(hand.process)
                self._forget(worker_id, Exit(None, "it was never started"))

    def send(self, worker_id: str, message: ToWorker) -> None:
        """To a worker that is gone nothing can be said; its end is told anyway."""
        hand = self._hands.get(worker_id)
        if hand is not None and hand.channel is not None:
            hand.channel.send(message)

    def place(self) -> None:
        """Start whoever has a place now."""
        self._start_again()
        for name in self._ground.abandoned():
            if (left := self._idle.pop(name, None)) is not None:
                left.nursery.end(left.process)
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
                idle.nursery.end(idle.process)
            self._start(worker_id, hand, place)

    def lose_home(self, home: str, why: str) -> None:
        """Everything there is gone, and nobody will say so."""
        for key in [key for key in self._nurseries if key[0] == home]:
            self._lose_nursery(key, why)

    def _start(self, worker_id: str, hand: _Hand, place: Place) -> None:
        try:
            hand.nursery = self._nursery(place.home, hand.task.entry)
        except (OSError, RuntimeError) as error:
            self._cannot_start(worker_id, f"a worker cannot be started: {error}", scarce_number(error))
            return
        self._player_of[hand.process] = worker_id
        hand.nursery.spawn(
            hand.process,
            address=self._listener.address,
            secret=self._secret,
            log=hand.log,
            env=place.env if place.command_env is None or not hand.task.command else place.command_env,
        )

    def _cannot_start(self, worker_id: str, why: str, number: int | None) -> None:
        """It has a place, and is tried again there if a limit of the machine is all that was in the way."""
        hand = self._hands[worker_id]
        retry = None if number is None else Retry.at(time.monotonic(), hand.retry)
        if number is None or retry is None:
            reached = "" if number is None else f": {limit_text(number)}"
            self._gone(worker_id, Exit(None, f"{why}{reached}"))
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
        hand.process, hand.nursery, hand.channel = idle.process, idle.nursery, idle.channel
        hand.born = True
        self._player_of[idle.process] = worker_id
        self._overseer.born(worker_id)
        idle.channel.send(hand.task)

    def forget_silent(self, awake_s: float) -> None:
        """A connection may outlive its worker, in the hands of a process that it left behind."""
        for worker_id, hand in list(self._hands.items()):
            if hand.how is not None:
                hand.gone_s = hand.gone_s or awake_s
                if awake_s - hand.gone_s > _LAST_WORDS_S:
                    self._forget(worker_id, hand.how)

    def close(self) -> None:
        """End all that is left and wait for it."""
        self._drop_idle(lambda _: True)  # they go when nobody is there to give them another task
        nurseries = list(self._nurseries.values())
        for nursery in nurseries:
            nursery.close()
        end_s = time.monotonic() + 2 * self._grace_s
        for nursery in nurseries:
            nursery.wait(max(end_s - time.monotonic(), 0.0))
        self._listener.close()

    def _nursery(self, home: str, entry: str) -> Nursery:
        key = (home, entry)
        if key not in self._nurseries:
            self._nurseries[key] = self._ground.nursery(
                home,
                entry,
                lambda saying: self._post(lambda: self._hear_nursery(saying)),
                lambda: self._post(lambda: self._lose_nursery(key, _NURSERY_ENDED)),
            )
        return self._nurseries[key]

    def _hear_nursery(self, saying: Saying) -> None:
        if saying.kind == "ready":
            return
        worker_id = self._player_of.get(saying.worker)
        if saying.kind == "note":
            if worker_id is not None and saying.text not in self._noted:  # every node says it
                self._noted.add(saying.text)
                self._overseer.noted(worker_id, saying.text)
            return
        if saying.kind == "born":
            if worker_id is not None:
                self._hands[worker_id].born = True
                self._overseer.born(worker_id)
            return
        if worker_id is None:
            self._drop_idle(lambda idle: idle.process == saying.worker)
        elif saying.kind == "gone" and saying.number in SCARCE and not self._hands[worker_id].born:
            del self._player_of[saying.worker]
            self._cannot_start(worker_id, saying.error, saying.number)
        elif saying.kind == "gone":
            self._gone(worker_id, Exit(saying.code, saying.error))
        else:
            self._gone(worker_id, Exit(None, saying.error, final=True))

    def _drop_idle(self, unwanted: Callable[[_Idle], bool]) -> None:
        for place, idle in list(self._idle.items()):
            if unwanted(idle):
                del self._idle[place]
                idle.channel.hang_up()

    def _lose_nursery(self, key: tuple[str, str], why: str) -> None:
        nursery = self._nurseries.pop(key, None)
        if nursery is None:
            return  # its home was lost before
        for worker_id, hand in list(self._hands.items()):
            if hand.nursery is nursery and hand.how is None:
                self._gone(worker_id, Exit(None, why))
        self._drop_idle(lambda idle: idle.nursery is nursery)

    def _gone(self, worker_id: str, how: Exit) -> None:
        """The last words may still be on their way: the end of the connection comes after them."""
        hand = self._hands[worker_id]
        hand.how = how
        if hand.channel is None:
            self._forget(worker_id, how)

    def _forget(self, worker_id: str, how: Exit) -> None:
        hand = self._hands.pop(worker_id)
        self._player_of.pop(hand.process, None)  # not before: its last words may come after its end
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
        """The worker is gone; its process is not, unless it said that it would go or was told to."""
        leaves = last_word.leaves or hand.unwanted or hand.how is not None
        if leaves or hand.nursery is None or hand.channel is None or hand.place is None:
            return
        del self._hands[worker_id], self._player_of[hand.process]
        self._idle[hand.place.name] = _Idle(hand.process, hand.task.entry, hand.nursery, hand.channel)
        self._ground.give_back(worker_id)
        self._overseer.gone(worker_id, Exit(0))

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
