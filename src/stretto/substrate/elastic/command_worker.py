"""A worker that trains by running a command: it starts it, speaks for it to the controller, and ends it.

The command is under a guard of its own (`process_guard`), so nothing of it outlives this process, and this
process says its last word only when nothing of the command is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

from stretto.core.errors import InputError
from stretto.substrate.elastic.command import (
    METRICS,
    gang_environment,
    importing,
    own_folder,
    rank_environment,
)
from stretto.substrate.local.command_child import Exit, Files, GuardedCommand, cannot_start, end_of
from stretto.system.private_files import make_private_folder
from stretto.wire.channel import Channel, connect
from stretto.wire.codec import WireError
from stretto.wire.messages import (
    Beat,
    CommandOrder,
    Failed,
    Finished,
    Form,
    Formed,
    Left,
    LetEnd,
    Message,
    Park,
    Printed,
    Ready,
    Task,
)

_BEAT_S = 1.0
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Notice(Enum):
    """Why a command must end, other than that it was parked."""

    DISMISSED = "dismissed"
    ALONE = "the controller is gone"


News = Message | Exit | Notice
_Awaited = TypeVar("_Awaited", Task, Form)


class _Unwanted(Exception):  # noqa: N818 - nothing went wrong
    """There is nothing to run any more."""


@dataclass(frozen=True, slots=True)
class Spot:
    """What a worker says of its place: `host:port/devices`, where the port is free."""

    host: str
    port: int
    devices: str
    """As CUDA wants them listed; empty: not managed."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.devices}"

    @classmethod
    def read(cls, text: str) -> Self:
        address, _, devices = text.partition("/")
        host, _, port = address.rpartition(":")
        return cls(host, int(port), devices)


def find_program(program: str) -> None:
    """Called in a nursery, before any worker: InputError if this node does not have it."""
    if shutil.which(program) is None:
        raise InputError(
            f"{program!r} is not a program that node {_host()} can run.",
            remedy="Have it on the PATH that Ray was started with there, or give a path that all nodes have.",
        )


def main(address: str, secret: str, worker_id: str) -> int:
    """Run the command that the controller asks for; the exit code."""
    news: SimpleQueue[News] = SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: news.put(Notice.DISMISSED))
    channel = connect(address, secret, worker_id)
    threading.Thread(target=_listen, args=(channel, news), name="controller", daemon=True).start()
    threading.Thread(target=_beat, args=(channel,), name="beat", daemon=True).start()
    last_word = Attendant(channel, news).serve()
    channel.send(last_word)
    return 1 if isinstance(last_word, Failed) else 0


def _listen(channel: Channel, news: SimpleQueue[News]) -> None:
    try:
        for message in channel.messages():
            news.put(message)
    except WireError as error:
        os.write(2, f"stretto: the controller makes no sense: {error}\n".encode())
    news.put(Notice.ALONE)


def _beat(channel: Channel) -> None:
    """Nobody can tell whether a command gets on, so it counts as getting on while it runs."""
    for number in count(1):
        if not channel.send(Beat(number)):
            return
        time.sleep(_BEAT_S)


class Attendant:
    """Sees one command through."""

    def __init__(self, channel: Channel, news: SimpleQueue[News]) -> None:
        self._channel = channel
        self._news = news

    def serve(self) -> Finished | Failed | Left:
        """Until nothing of the command is left; the last word on it."""
        try:
            task = self._wait_for(Task)
            with socket.socket() as held:  # while it is, no other worker of this node gets the port
                held.bind(("", 0))
                port = int(held.getsockname()[1])
                own = str(Spot(_host(), port, os.environ.get(_DEVICES, "")))
                self._channel.send(Ready(own))
                form = self._wait_for(Form)
        except _Unwanted as unwanted:
            return Left(str(unwanted), leaves=True)
        log = Path(task.folder) / "stdout.log"
        try:
            command = self._start(task, form, own, log)
        except (OSError, ValueError) as error:
            return _last_word(cannot_start(error), form, log)
        self._channel.send(Formed(form.generation))
        return _last_word(self._attend(command), form, log)

    def _wait_for(self, kind: type[_Awaited]) -> _Awaited:
        while not isinstance(said := self._news.get(), kind):
            if why := _unwanted(said):
                raise _Unwanted(why)
        return said

    def _start(self, task: Task, form: Form, own: str, log: Path) -> GuardedCommand:
        order = task.command
        assert order is not None
        leads = form.rank == 0
        make_private_folder(own_folder(log.parent))
        return GuardedCommand(
            order.argv,
            env={**importing({**os.environ, **order.env}), **_group_environment(task.job_id, order, form)},
            ranks=[rank_environment(form.rank, local_rank=form.neighbours.index(own))],
            cwd=Path(order.cwd) if order.cwd else None,
            files=Files(log=log, metrics=log.with_name(METRICS), lock=log.with_name(f"lock.{form.rank}")),
            keys=order.keys if leads else (),
            metric=order.metric if leads else None,
            tells_missed=leads and order.tells_missed,
            grace_s=order.grace_s,
            on_line=self._pass_on if leads else _pass_over,
            on_missed=self._pass_on_missed,
            on_exit=self._news.put,
        )

    def _attend(self, command: GuardedCommand) -> Exit:
        while not isinstance(said := self._news.get(), Exit):
            if isinstance(said, LetEnd):
                command.let_end()
            elif _unwanted(said):
                command.ask_to_stop()
                command.wait()
        return said

    def _pass_on(self, line: bytes) -> None:
        self._channel.send(Printed(line.decode(errors="replace")))

    def _pass_on_missed(self, line: bytes) -> None:
        self._channel.send(Printed(line.decode(errors="replace"), missed=True))


def _pass_over(line: bytes) -> None:
    """Only the first process of a group reports."""


def _unwanted(said: News) -> str:
    """Why nothing is to run any more, if that is what was said."""
    if isinstance(said, Notice):
        return said.value
    return "parked" if isinstance(said, Park) else ""


def _group_environment(job_id: str, order: CommandOrder, form: Form) -> dict[str, str]:
    """What all processes of a group on this node are told: its devices are those of all of them."""
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


def _last_word(how: Exit, form: Form, log: Path) -> Finished | Failed | Left:
    if how.asked:
        return Left("stopped", leaves=True)
    if how.code == 0:
        return Finished(leaves=True)
    whose = replace(how, rank=form.rank if form.world > 1 else None)
    return Failed(f"{whose.text}; {end_of(log)}", final=not how.started)


def _host() -> str:
    return os.environ.get("STRETTO_HOST", "127.0.0.1")
