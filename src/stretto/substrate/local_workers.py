"""Worker processes: who waits for a slot, who runs where, who can be talked to."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stretto.substrate.local_effects import Exit
from stretto.substrate.local_nursery import Nursery, Saying, Trainer
from stretto.substrate.local_slots import SlotPool, Slots
from stretto.wire.channel import Channel, Listener
from stretto.wire.codec import WireError
from stretto.wire.messages import Finished, FromWorker, Left, Message, Task, ToWorker

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Workers of one machine need no other network, and its name may lead nowhere."""
_LAST_WORDS_S = 1.0
"""How long after a worker's end its connection may still bring something it said."""

Post = Callable[[Callable[[], None]], None]
"""Has something done in the one thread where everything happens."""


class Overseer(Protocol):
    """Who is told about workers."""

    def born(self, worker_id: str) -> None: ...
    def heard(self, worker_id: str, message: FromWorker) -> None: ...
    def confused(self, worker_id: str, why: str) -> None: ...
    def gone(self, worker_id: str, how: Exit) -> None: ...


@dataclass(slots=True)
class _Hand:
    """One worker that is wanted or there."""

    task: Task
    log: Path
    process: str
    """What its process is called, which may have served others before."""
    slot: int = -1
    nursery: Nursery | None = None
    channel: Channel | None = None
    unwanted: bool = False
    """It was told to end."""
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

    A process whose task ended well stays on its slot for the next task of the same entry, unless it has a
    GPU: memory there is given back only when a process ends.
    """

    def __init__(
        self,
        *,
        slots: Slots,
        trainer: Trainer,
        grace_s: float,
        run_dir: Path,
        lock_fd: int,
        post: Post,
        overseer: Overseer,
    ) -> None:
        self._slots = slots
        self._trainer = trainer
        self._grace_s = grace_s
        self._log = run_dir / "nursery.log"
        self._lock_fd = lock_fd
        self._post = post
        self._overseer = overseer
        self._pool = SlotPool(slots)
        self._hands: dict[str, _Hand] = {}
        self._player_of: dict[str, str] = {}
        """Which worker a process is at present."""
        self._idle: dict[int, _Idle] = {}
        self._nurseries: dict[str, Nursery] = {}
        self._secret = secrets.token_hex(32)
        self._listener = Listener(self._secret, self._serve)
        self._env = {
            "OMP_NUM_THREADS": str(slots.threads_each),  # unless the user has set it
            **_LOOPBACK,
            **({"STRETTO_BACKEND": "gloo"} if slots.share_gpus else {}),  # NCCL wants a GPU for each worker
            **os.environ,
            "STRETTO_GRACE_S": str(grace_s),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or code that asks for a GPU could not be forked any more
        }

    def spawn(self, worker_id: str, task: Task, log: Path) -> None:
        """As soon as a slot is free."""
        task = replace(task, stays=not self._slots.has_gpus)
        self._hands[worker_id] = _Hand(task, log, process=worker_id)
        self._pool.ask(worker_id)

    def end(self, worker_id: str, *, at_once: bool) -> None:
        hand = self._hands.get(worker_id)
        if hand is None:
            return
        if self._pool.withdraw(worker_id):
            self._forget(worker_id, Exit(None, "it was never started"))
        elif hand.nursery is not None and hand.how is None:
            hand.unwanted = True
            (hand.nursery.kill if at_once else hand.nursery.end)(hand.process)

    def send(self, worker_id: str, message: ToWorker) -> None:
        """To a worker that is gone nothing can be said; its end is told anyway."""
        hand = self._hands.get(worker_id)
        if hand is not None and hand.channel is not None:
            hand.channel.send(message)

    def place(self) -> None:
        """Start whoever has a slot now."""
        for worker_id, slot in self._pool.grants():
            hand = self._hands[worker_id]
            hand.slot = slot
            idle = self._idle.pop(slot, None)
            if idle is not None and idle.entry == hand.task.entry:
                self._reuse(worker_id, hand, idle)
                continue
            if idle is not None:
                idle.nursery.end(idle.process)
            try:
                hand.nursery = self._nursery(hand.task.entry)
            except OSError as error:
                self._gone(worker_id, Exit(None, f"a worker cannot be started: {error}"))
                continue
            self._player_of[hand.process] = worker_id
            hand.nursery.spawn(
                hand.process,
                address=self._listener.address,
                secret=self._secret,
                log=hand.log,
                env={"CUDA_VISIBLE_DEVICES": self._slots.devices[slot], "STRETTO_SLOT": str(slot)},
            )

    def _reuse(self, worker_id: str, hand: _Hand, idle: _Idle) -> None:
        hand.process, hand.nursery, hand.channel = idle.process, idle.nursery, idle.channel
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
        for nursery in nurseries:
            nursery.wait(2 * self._grace_s)
        self._listener.close()

    def _nursery(self, entry: str) -> Nursery:
        if entry not in self._nurseries:
            self._nurseries[entry] = Nursery(
                entry,
                self._trainer,
                grace_s=self._grace_s,
                env=self._env,
                log=self._log,
                lock_fd=self._lock_fd,
                on_saying=lambda saying: self._post(lambda: self._hear_nursery(saying)),
                on_end=lambda: self._post(lambda: self._lose_nursery(entry)),
            )
        return self._nurseries[entry]

    def _hear_nursery(self, saying: Saying) -> None:
        worker_id = self._player_of.get(saying.worker)
        if saying.kind == "born":
            if worker_id is not None:
                self._overseer.born(worker_id)
            return
        if worker_id is None:
            self._drop_idle(lambda idle: idle.process == saying.worker)
        elif saying.kind == "gone":
            self._gone(worker_id, Exit(saying.code, saying.error))
        else:
            self._gone(worker_id, Exit(None, saying.error, final=True))

    def _drop_idle(self, unwanted: Callable[[_Idle], bool]) -> None:
        for slot, idle in list(self._idle.items()):
            if unwanted(idle):
                del self._idle[slot]
                idle.channel.close()

    def _lose_nursery(self, entry: str) -> None:
        nursery = self._nurseries.pop(entry)
        why = f"the process that starts its workers has ended; {self._log} may say why"
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
            hand.channel.close()
        self._pool.give_back(worker_id)
        self._overseer.gone(worker_id, how)

    def _serve(self, channel: Channel) -> None:
        """In a thread of the connection's own."""
        self._post(lambda: self._connected(channel))
        why = ""
        try:
            for message in channel.messages():
                self._post(lambda message=message: self._heard(channel.worker, message))  # type: ignore[misc]
        except WireError as error:
            why = f"a worker makes no sense: {error}"
        self._post(lambda: self._hung_up(channel, why))

    def _connected(self, channel: Channel) -> None:
        hand = self._hand_of(channel.worker)
        if hand is None or hand.channel is not None:
            channel.close()
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
        if leaves or hand.nursery is None or hand.channel is None:
            return
        del self._hands[worker_id], self._player_of[hand.process]
        self._idle[hand.slot] = _Idle(hand.process, hand.task.entry, hand.nursery, hand.channel)
        self._pool.give_back(worker_id)
        self._overseer.gone(worker_id, Exit(0))

    def _hand_of(self, process: str) -> _Hand | None:
        worker_id = self._player_of.get(process)
        return None if worker_id is None else self._hands.get(worker_id)

    def _hung_up(self, channel: Channel, why: str) -> None:
        channel.close()
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
