"""A worker that trains by running a command: it starts the command, reports for it and ends it.

The command has a guard of its own (`guard.py`), so nothing of it outlives this process. The worker
sends its last message when nothing of the command is left.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Self, TypeVar

from stretto.core.errors import InputError
from stretto.substrate.elastic.command import METRICS, gang_environment, importing, own_folder
from stretto.substrate.elastic.guarded_command import (
    CommandEnd,
    CommandFiles,
    GuardedCommand,
    cannot_start,
    end_of,
)
from stretto.system.limits import Retry
from stretto.system.private_files import make_private_folder
from stretto.wire.channel import Channel, connect
from stretto.wire.codec import WireError
from stretto.wire.messages import (
    Beat,
    CommandOrder,
    EndNow,
    Failed,
    Finished,
    Flooded,
    Form,
    Formed,
    Left,
    LetEnd,
    Message,
    Note,
    Park,
    Printed,
    Ready,
    Task,
)

_BEAT_S = 1.0
_DEVICES = "CUDA_VISIBLE_DEVICES"
_HOST = "STRETTO_HOST"
"""On nodes of a cluster, the address of this node."""


class Notice(Enum):
    """A reason other than Park to end the command."""

    DISMISSED = "dismissed"
    ALONE = "the controller is gone"


News = Message | CommandEnd | Notice
_Awaited = TypeVar("_Awaited", Task, Form)


class _Unwanted(Exception):  # noqa: N818 - nothing went wrong
    """The command is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a worker runs: `host:port/devices`, with a free port."""

    host: str
    port: int
    devices: str
    """The value of CUDA_VISIBLE_DEVICES; empty: not managed."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.devices}"

    @classmethod
    def read(cls, text: str) -> Self:
        address, _, devices = text.partition("/")
        host, _, port = address.rpartition(":")
        return cls(host, int(port), devices)


def main(address: str, secret: str, worker_id: str) -> int:
    """Run the command that the controller sends. Returns the exit code."""
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: news.put(Notice.DISMISSED))
    channel = connect(address, secret, worker_id)
    threading.Thread(target=_listen, args=(channel, news), name="controller", daemon=True).start()
    threading.Thread(target=_beat, args=(channel,), name="beat", daemon=True).start()
    last_word = Attendant(channel, news).serve()
    channel.send(last_word)
    return 1 if isinstance(last_word, Failed) else 0


def _listen(channel: Channel, news: queue.SimpleQueue[News]) -> None:
    try:
        for message in channel.messages():
            news.put(message)
    except WireError as error:
        os.write(2, f"stretto: the controller makes no sense: {error}\n".encode())
    news.put(Notice.ALONE)


def _beat(channel: Channel) -> None:
    """We cannot see whether a command makes progress, so every beat counts as a step."""
    for number in count(1):
        if not channel.send(Beat(number)):
            return
        time.sleep(_BEAT_S)


class Attendant:
    """Runs one command from its start to its end."""

    def __init__(self, channel: Channel, news: queue.SimpleQueue[News]) -> None:
        self._channel = channel
        self._news = news
        self._killed = False
        """Whether the controller asked to kill the command at once."""

    def serve(self) -> Finished | Failed | Left:
        """Returns the last message, when nothing of the command is left."""
        try:
            task = self._wait_for(Task)
            with socket.socket() as held:  # meanwhile no other worker of this node gets the port
                held.bind(("", 0))
                port = int(held.getsockname()[1])
                own = str(Spot(_host(), port, os.environ.get(_DEVICES, "")))
                self._channel.send(Ready(own))
                form = self._wait_for(Form)
            self._channel.send(Formed(form.generation))
            return self._run(task, form, own)
        except _Unwanted as unwanted:
            return Left(str(unwanted), leaves=True)

    def _run(self, task: Task, form: Form, own: str) -> Finished | Failed | Left:
        """Run the command. If a limit of the machine prevents the start, wait and try again."""
        log, retry = Path(task.folder) / "stdout.log", None
        while True:
            end = self._run_once(task, form, own, log)
            retry = None if end.scarce is None or end.asked else Retry.at(time.monotonic(), retry)
            if retry is None:
                return self._last_word(end, form, log)
            self._channel.send(Note(f"{end.error}. It waits and is tried again; this is said once."))
            self._wait_until(retry.again_s)

    def _run_once(self, task: Task, form: Form, own: str, log: Path) -> CommandEnd:
        try:
            command = self._start(task, form, own, log)
        except (OSError, ValueError, InputError) as error:
            return cannot_start(error, error.errno if isinstance(error, OSError) else None)
        while not isinstance(said := self._news.get(), CommandEnd):
            if isinstance(said, LetEnd):
                command.let_end()
            elif isinstance(said, EndNow):
                self._killed = True
                command.end_now()
            elif _unwanted(said):
                command.ask_to_stop()
        return said

    def _wait_for(self, kind: type[_Awaited]) -> _Awaited:
        while not isinstance(said := self._news.get(), kind):
            _check_wanted(said)
        return said

    def _wait_until(self, at_s: float) -> None:
        while (left_s := at_s - time.monotonic()) > 0:
            try:
                _check_wanted(self._news.get(timeout=left_s))
            except queue.Empty:
                return

    def _start(self, task: Task, form: Form, own: str, log: Path) -> GuardedCommand:
        order = task.command
        assert order is not None
        leads = form.rank == 0
        cwd = Path(order.cwd) if order.cwd else None
        _check_program(order.argv[0], cwd or Path())
        make_private_folder(own_folder(log.parent))
        rank = {"RANK": str(form.rank), "LOCAL_RANK": str(form.neighbours.index(own))}
        group = _group_environment(task.job_id, order, form)
        return GuardedCommand(
            order.argv,
            env={**importing({**os.environ, **order.env}), **group, **rank},
            cwd=cwd,
            files=CommandFiles(
                log=log, metrics=log.with_name(METRICS), lock=log.with_name(f"lock.{form.rank}")
            ),
            keys=order.keys if leads else (),
            metric=order.metric if leads else None,
            tells_missed=leads and order.tells_missed,
            grace_s=order.grace_s,
            on_line=self._pass_on if leads else _pass_over,
            on_missed=self._pass_on_missed,
            on_exit=self._news.put,
            on_flood=self._pass_on_flood,
        )

    def _pass_on(self, line: bytes) -> None:
        self._channel.send(Printed(line.decode(errors="replace")))

    def _pass_on_missed(self, line: bytes) -> None:
        self._channel.send(Printed(line.decode(errors="replace"), missed=True))

    def _pass_on_flood(self) -> None:
        self._channel.send(Flooded())

    def _last_word(self, end: CommandEnd, form: Form, log: Path) -> Finished | Failed | Left:
        if end.asked:
            killed = end.code == -signal.SIGKILL and not self._killed
            return Left("stopped", leaves=True, killed=killed)
        if end.code == 0:
            return Finished(leaves=True)
        named = replace(end, rank=form.rank if form.world > 1 else None)
        return Failed(f"{named.text}; {end_of(log)}", final=not end.started)


def _pass_over(line: bytes) -> None:
    """Only the first process of a group reports."""


def _check_program(program: str, cwd: Path) -> None:
    """InputError if this node of a cluster does not have the program."""
    if _HOST in os.environ and shutil.which(cwd / program if "/" in program else program) is None:
        raise InputError(
            f"{program!r} is not a program that node {_host()} can run.",
            remedy="Have it on the PATH that Ray was started with there, or give a path that all nodes have.",
        )


def _check_wanted(said: News) -> None:
    if why := _unwanted(said):
        raise _Unwanted(why)


def _unwanted(said: News) -> str:
    """Why the command must end; empty if the message does not say so."""
    if isinstance(said, Notice):
        return said.value
    return "parked" if isinstance(said, Park | EndNow) else ""


def _group_environment(job_id: str, order: CommandOrder, form: Form) -> dict[str, str]:
    """Variables for all processes of a group on this node, including the devices of all of them."""
    first = Spot.read(form.store)
    env = gang_environment(
        job_id,
        world=form.world,
        local_world=len(form.neighbours),
        restarts=order.restarts,
        host=first.host,
        port=first.port,
    )
    devices = dict.fromkeys(Spot.read(one).devices for one in form.neighbours)
    return env | ({_DEVICES: ",".join(devices)} if all(devices) else {})


def _host() -> str:
    return os.environ.get(_HOST, "127.0.0.1")
