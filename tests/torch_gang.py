"""A little controller for tests of the training library: forks workers and speaks to them over the wire."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from stretto.torch.worker import main
from stretto.wire.channel import Channel
from stretto.wire.listener import Listener
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
M = TypeVar("M")


class Member:
    """One forked worker."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.channel: Channel | None = None
        self.said: list[FromWorker] = []
        self.exit_code: int | None = None


class Gang:
    """Workers of one job, told what to do by the test."""

    def __init__(self, entry: str, folder: Path, **task: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.task = Task(
            **{"job_id": "a", "entry": entry, "config": {}, "folder": str(folder), "epochs": None, "seed": 1}
            | task
        )
        self.members: dict[str, Member] = {}
        self.generation = 0
        self.trained: set[str] = set()
        """Who is part of the group."""
        self._news: queue.Queue[tuple[str, Message | None]] = queue.Queue()
        self._listener = Listener(SECRET, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            if member.exit_code is None:
                os.kill(member.pid, signal.SIGKILL)
                os.waitpid(member.pid, 0)
            if member.channel is not None:
                member.channel.hang_up()
        self._listener.close()

    def spawn(self, name: str, *, fresh: bool = False) -> Member:
        """Forked from this process, which has torch in memory; `fresh`: a Python that must load it."""
        if fresh:
            self.members[name] = Member(name, self._start_python(name))
            return self.members[name]
        pid = os.fork()
        if pid == 0:
            log = os.open(self.folder / "stdout.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 99
            try:
                code = main(self._listener.address, SECRET, name)
            finally:
                sys.stdout.flush()
                os._exit(code)
        self.members[name] = Member(name, pid)
        return self.members[name]

    def _start_python(self, name: str) -> int:
        code = (
            f"from stretto.torch.worker import main; main({self._listener.address!r}, {SECRET!r}, {name!r})"
        )
        with (self.folder / "stdout.log").open("ab") as log:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", code],
                dict(os.environ),
                file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)],
            )

    def connected(self, channel: Channel) -> None:
        self.members[channel.worker].channel = channel
        channel.send(self.task)

    def heard(self, channel: Channel, message: Message) -> None:
        self.members[channel.worker].said.append(message)  # type: ignore[arg-type]
        self._news.put((channel.worker, message))

    def hung_up(self, channel: Channel, why: str) -> None:
        del why
        self._news.put((channel.worker, None))

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
        deadline_s = time.monotonic() + 60.0
        while member.exit_code is None:
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                member.exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline_s:
                raise AssertionError(f"{name} does not end: {(self.folder / 'stdout.log').read_text()}")
            else:
                time.sleep(0.01)
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
