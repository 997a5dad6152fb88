"""Workers that a limit of the machine keeps from being started: they wait, and the limit is named."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from stretto.substrate.elastic.effects import WorkerExit
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.substrate.elastic.workers import Place, Workers
from stretto.system import limits as scarce
from stretto.system.limits import limit_text
from stretto.wire.messages import FromWorker, Task


class Cradle:
    """A nursery that only takes note of what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None:
        del address, secret, log, env
        self.told.append(("spawn", worker))

    def end(self, worker: str) -> None:
        self.told.append(("end", worker))

    def kill(self, worker: str) -> None:
        self.told.append(("kill", worker))

    def close(self) -> None:
        """Nothing runs."""

    def wait(self, patience_s: float) -> None:
        """Nothing runs."""


class Scene:
    """One place, where starting a nursery fails at first; and who is told about workers."""

    host = "127.0.0.1"

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.cradle = Cradle()
        self.notes: list[str] = []
        self.ends: list[tuple[str, WorkerExit]] = []
        self.say: Callable[[WorkerNews], None] = lambda _: None
        self._asked: list[str] = []
        self.workers = Workers(ground=self, grace_s=1.0, post=lambda step: step(), overseer=self)

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        del job_id, node
        self._asked.append(worker_id)

    def withdraw(self, worker_id: str) -> bool:
        return worker_id in self._asked

    def grants(self) -> list[tuple[str, Place]]:
        asked, self._asked = self._asked, []
        return [(worker_id, Place("0", "", {}, stays=False)) for worker_id in asked]

    def give_back(self, worker_id: str) -> None:
        """It is one of many."""

    def abandoned(self) -> list[str]:
        return []

    def fork_server(
        self, home: str, entry: str, on_saying: Callable[[WorkerNews], None], on_end: Callable[[], None]
    ) -> Cradle:
        del home, entry, on_end
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.say = on_saying
        return self.cradle

    def seated(self, worker_id: str) -> None: ...
    def born(self, worker_id: str) -> None: ...
    def heard(self, worker_id: str, message: FromWorker) -> None: ...
    def confused(self, worker_id: str, why: str) -> None: ...

    def noted(self, worker_id: str, text: str) -> None:
        del worker_id
        self.notes.append(text)

    def gone(self, worker_id: str, how: WorkerExit) -> None:
        self.ends.append((worker_id, how))

    def place_until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end_s
            self.workers.place()
            time.sleep(0.005)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(scarce, "FIRST_WAIT_S", 0.01)
    made = Scene(failures=2)
    yield made
    made.workers.close()


def spawn(scene: Scene) -> None:
    task = Task(job_id="a", entry="train.py:train", config={}, folder="/nowhere", epochs=1, seed=0)
    scene.workers.spawn("w", "", task, Path("/nowhere/stdout.log"))


def test_a_worker_waits_for_a_limit_of_its_nursery_and_then_of_its_own(scene: Scene) -> None:
    spawn(scene)
    scene.place_until(lambda: bool(scene.cradle.told))
    assert scene.cradle.told == [("spawn", "w")]
    scene.say(WorkerNews("gone", "w", error="a worker cannot be started: no more", number=errno.EAGAIN))
    scene.place_until(lambda: len(scene.cradle.told) == 2)
    assert scene.cradle.told == [("spawn", "w"), ("spawn", "w")]
    assert scene.ends == []
    assert [limit_text(number) in note for number, note in zip((24, 11), scene.notes, strict=True)] == [
        True
    ] * 2


def test_a_worker_that_waits_for_a_limit_can_be_called_off(scene: Scene) -> None:
    scene.failures = 10**6
    spawn(scene)
    scene.place_until(lambda: bool(scene.notes))
    scene.workers.end("w", at_once=False)
    assert [worker for worker, _ in scene.ends] == ["w"]
    scene.workers.place()


def test_a_worker_does_not_wait_for_ever(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarce, "PATIENCE_S", 0.02)
    scene.failures = 10**6
    spawn(scene)
    scene.place_until(lambda: bool(scene.ends))
    assert limit_text(errno.EMFILE) in scene.ends[0][1].error
