"""A little controller for tests of the training library: speaks to workers over the wire."""

from __future__ import annotations

import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from stretto.substrate.elastic.fork_servers import ForkServerProcess, Trainer, WorkerNews, training_env
from stretto.wire.channel import Channel, Listener
from stretto.wire.messages import (
    BatchOrder,
    EpochEnd,
    Form,
    Formed,
    FromWorker,
    Leave,
    Message,
    Ready,
    Report,
    Task,
)

SECRET = "of this test"  # noqa: S105 - it guards nothing
GRACE_S = 10.0
NEVER_STARTED = 99
"""As an exit code."""
M = TypeVar("M")


class Cradle:
    """A fork server that the gangs of many tests share: to import torch takes longer than any of them."""

    def __init__(self, entry: str, folder: Path) -> None:
        self.entry = entry
        self._members: dict[str, Member] = {}
        self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        self._fork_server = ForkServerProcess(
            entry,
            Trainer(),
            grace_s=GRACE_S,
            env={**os.environ, **training_env(threads=2, grace_s=GRACE_S)},
            log=folder / "nursery.log",
            lock_fd=self._lock_fd,
            on_news=self._heard,
            on_end=lambda: None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._fork_server.close()
        self._fork_server.wait(GRACE_S)
        os.close(self._lock_fd)

    def spawn(self, member: Member, address: str, log: Path) -> None:
        self._members[member.worker] = member
        self._fork_server.spawn(member.worker, address=address, secret=SECRET, log=log, env={})

    def kill(self, member: Member) -> None:
        self._fork_server.kill(member.worker)

    def _heard(self, saying: WorkerNews) -> None:
        if saying.kind in ("gone", "import-failed"):
            member = self._members.pop(saying.worker)
            member.ended(saying.code if saying.code is not None else NEVER_STARTED)


class Member:
    """One worker."""

    def __init__(self, name: str) -> None:
        self.worker = f"{name}-{secrets.token_hex(4)}"
        """A name that no other gang of the fork server has."""
        self.python: subprocess.Popen[bytes] | None = None
        """If it was not forked."""
        self.channel: Channel | None = None
        self.said: list[FromWorker] = []
        self.exit_code: int | None = None
        self.over = threading.Event()

    def ended(self, code: int) -> None:
        self.exit_code = code
        self.over.set()


class Gang:
    """Workers of one job, told what to do by the test."""

    def __init__(self, cradle: Cradle, folder: Path, **task: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cradle = cradle
        self.folder = folder
        plain: dict[str, Any] = {
            "job_id": "a",
            "entry": cradle.entry,
            "config": {},
            "epochs": None,
            "seed": 1,
        }
        self.task = Task(**plain | {"folder": str(folder)} | task)
        self.members: dict[str, Member] = {}
        self.generation = 0
        self.trained: set[str] = set()
        """Who is part of the group."""
        self._by_worker: dict[str, Member] = {}
        self._news: queue.Queue[None] = queue.Queue()
        self._listener = Listener(SECRET, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, member in self.members.items():
            self.kill(name)
            assert member.over.wait(60.0), f"{name} cannot be killed"
            if member.channel is not None:
                member.channel.hang_up()
        self._listener.close()

    def spawn(self, name: str, *, fresh: bool = False) -> None:
        """From a process that has torch in memory; `fresh`: as a Python that must load it."""
        member = self.members[name] = Member(name)
        self._by_worker[member.worker] = member
        if fresh:
            self._start_python(member)
        else:
            self.cradle.spawn(member, self._listener.address, self.folder / "stdout.log")

    def _start_python(self, member: Member) -> None:
        call = f"main({self._listener.address!r}, {SECRET!r}, {member.worker!r})"
        with (self.folder / "stdout.log").open("ab") as log:
            python = member.python = subprocess.Popen(
                [sys.executable, "-c", f"from stretto.torch.worker import main; {call}"],
                stdout=log,
                stderr=log,
            )
        threading.Thread(target=lambda: member.ended(python.wait()), daemon=True).start()

    def kill(self, name: str) -> None:
        """Whoever has ended is left alone."""
        member = self.members[name]
        if member.python is not None:
            member.python.kill()
        else:
            self.cradle.kill(member)

    def connected(self, channel: Channel) -> None:
        self._by_worker[channel.worker].channel = channel
        channel.send(self.task)

    def heard(self, channel: Channel, message: Message) -> None:
        self._by_worker[channel.worker].said.append(message)  # type: ignore[arg-type]
        self._news.put(None)

    def hung_up(self, channel: Channel, why: str) -> None:
        del channel, why
        self._news.put(None)

    def tell(self, name: str, message: Message) -> None:
        channel = self.members[name].channel
        assert channel is not None
        channel.send(message)

    def wait(
        self, name: str, kind: type[M], where: Callable[[M], bool] = lambda _: True, after: int = 0
    ) -> M:
        """The first message of this kind that this worker has said, or says in time."""
        end_s = time.monotonic() + 60.0
        while True:
            for message in self.members[name].said[after:]:
                if isinstance(message, kind) and where(message):
                    return message
            if time.monotonic() > end_s:
                log = (self.folder / "stdout.log").read_text()
                raise AssertionError(f"{name} did not say {kind.__name__}; {self.members[name].said}; {log}")
            try:
                self._news.get(timeout=0.05)
            except queue.Empty:
                continue

    def form(self, *names: str, batch: BatchOrder | None = None, wait: bool = True) -> None:
        """Make these workers the group, the first one its leader; others that train are dismissed."""
        ready = {name: self.wait(name, Ready) for name in names}
        self.generation += 1
        for rank, name in enumerate(names):
            self.tell(
                name,
                Form(
                    generation=self.generation,
                    rank=rank,
                    world=len(names),
                    nodes=1,
                    store=ready[names[0]].store,
                    share_state=any(name not in self.trained for name in names),
                    batch=batch,
                ),
            )
        for name in self.trained - set(names):
            self.tell(name, Leave(self.generation))
        self.trained = set(names)
        if wait:
            generation = self.generation
            self.wait(names[0], Formed, lambda formed: formed.generation == generation)

    def end(self, name: str) -> int:
        """Its exit code."""
        member = self.members[name]
        if not member.over.wait(60.0) or member.exit_code is None:
            raise AssertionError(f"{name} does not end: {(self.folder / 'stdout.log').read_text()}")
        return member.exit_code

    def epoch_ends(self) -> dict[int, EpochEnd]:
        ends: dict[int, EpochEnd] = {}
        for member in self.members.values():
            for message in list(member.said):
                if isinstance(message, Report):
                    ends.update({end.epoch: end for end in message.ends})
        return ends


def wait_until(done: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end_s, "it did not happen in time"
        threading.Event().wait(0.01)
