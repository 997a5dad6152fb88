"""Nodes that the user's commands bring up: `ray start` over ssh, a cloud's command line, local processes.

Every launched node has files in the run's folder:

NAME.json   its process, so that a later controller can end the node if this one is killed
NAME.late   the same, for a node that was released before it came and may still come
NAME.log    the output of its commands; kept if the launch command failed

If a late node may still come when the run stops, its file becomes NAME.json again, and a resumed run releases
the node once more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stretto.core.errors import InputError
from stretto.journal.folds.nodes import end_of
from stretto.substrate.fleet.commands import Commands
from stretto.substrate.fleet.nodes import NodeKind
from stretto.substrate.ray.launch import LaunchBegan, LaunchFailed, LaunchNews, Mailbox
from stretto.system.plain_json import UnreadableError, read_json
from stretto.system.private_files import make_private_folder, private_opener, write_private

_RELEASE_TRIES = 3
_RELEASE_PAUSE_S = 2.0
_RELEASE_S = 120.0
"""A release command that takes longer is killed."""
_POLL_S = 0.05
_SHOWN_CHARS = 400
"""How much of a failed command's output is reported."""
_RECORD = ".json"
_LATE = ".late"


@dataclass(frozen=True, slots=True)
class _Launched:
    """What is stored about a node."""

    number: int
    instance: str
    pid: int
    begun: str
    """When the process began, by the kernel's clock, because process ids are used again.

    Empty if it had ended before we looked.
    """

    def is_running(self) -> bool:
        return bool(self.begun) and _begun(self.pid) == self.begun

    def kill_group(self) -> None:
        """Kill the process group. While it has members, no new process gets its id."""
        if _begun(self.pid) in {"", self.begun}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class CommandLauncher:
    """Runs a launch command for every new node, and a release command for every node given back."""

    adopts = False

    def __init__(
        self,
        commands: Commands,
        kinds: Iterable[NodeKind],
        *,
        address: str,
        folder: Path,
        grace_s: float = 10.0,
    ) -> None:
        """`folder` is the one for nodes in the run's; `grace_s` is how long processes may take to end."""
        self.kinds = tuple(kinds)
        self._commands = commands
        self._slots = {kind.instance: kind.slots for kind in self.kinds}
        self._address = address
        self._folder = folder.absolute()
        make_private_folder(self._folder)
        self._grace_s = grace_s
        self._mailbox = Mailbox()
        self._launched = _read_all(self._folder, _RECORD)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._endings: dict[str, tuple[threading.Thread, str]] = {}
        """The threads that release nodes, with the nodes' ids in Ray."""
        self._unended: dict[str, str] = {}
        """Nodes whose release failed, and their ids in Ray."""
        self._released: set[str] = set()
        """Nodes whose release succeeded."""
        self._given_up = _read_all(self._folder, _LATE)
        """Nodes that were released before they came, and may still come."""
        self._in_charge = False
        """Whether this process drives the run; otherwise another one may need the files."""
        self._late: dict[str, str] = {}
        """Nodes that came while they were being released, and their ids in Ray."""
        self._unwanted = set(self._given_up)
        """Nodes that were released: the end of their launch commands is no failure."""
        self._failed: set[str] = set()

    def launched(self) -> Collection[str]:
        return (*self._launched, *self._given_up)

    def recall(self, rented: Mapping[str, str]) -> None:
        """Nothing to take over: the files have it all."""
        del rented
        self._in_charge = True

    def launch(self, name: str, instance: str) -> None:
        self._in_charge = True
        self._forget(name)
        taken = {one.number for one in self._launched.values()}
        number = next(number for number in range(1, len(taken) + 2) if number not in taken)
        argv = self._argv(self._commands.launch, name, instance, number)
        try:
            process = self._start(argv, name)
        except OSError as error:
            self._log(name).unlink(missing_ok=True)
            self._mailbox.post(LaunchFailed(name, f"{argv[0]} cannot be run: {error.strerror}"))
            return
        self._processes[name] = process
        self._launched[name] = _Launched(number, instance, process.pid, _begun(process.pid))
        _write(self._file(name, _RECORD), self._launched[name])
        self._mailbox.post(LaunchBegan(name))
        threading.Thread(target=self._watch, args=(name, process), name=f"launch {name}", daemon=True).start()

    def release(self, name: str, ray_id: str) -> None:
        """Release a node, again if it was released before it came and has come since."""
        self._in_charge = True
        if name in self._endings:
            if ray_id and not self._endings[name][1]:
                self._late[name] = ray_id
            return
        if ray_id and name in self._given_up:
            self._take_up(name)
        if name not in self._launched:
            if ray_id and name not in self._unwanted:
                _warn_of(name, "there is no record of its launch")
            return
        self._unwanted.add(name)
        launched = self._launched[name]
        thread = threading.Thread(target=self._end, args=(name, launched, ray_id), name=f"release {name}")
        self._endings[name] = thread, ray_id
        thread.start()

    def news(self) -> list[LaunchNews]:
        self._tidy()
        return self._mailbox.collect()

    def settle(self) -> frozenset[str]:
        self._tidy()
        while self._endings:
            for thread, _ in self._endings.values():
                thread.join()
            self._tidy()
        return frozenset(self._given_up.keys() - self._failed)

    def close(self, awaited: Collection[str] = ()) -> None:
        """Retry failed releases, and keep the records of nodes that may still come."""
        self._tidy()
        for name, ray_id in self._unended.items():
            self.release(name, ray_id)
        late = self.settle()
        for name in list(self._given_up) if self._in_charge else ():
            if name in awaited and name in late:
                self._leave_on_record(name)
            else:
                self._forget(name)

    def _take_up(self, name: str) -> None:
        """Prepare another release, unless the command would end another node, which has its number now."""
        launched = self._given_up[name]
        taken = launched.number in {one.number for one in self._launched.values()}
        if taken and "{number" in self._commands.release:
            _warn_of(name, f"another node has its number {launched.number} now")
            return
        self._launched[name] = self._given_up.pop(name)
        self._file(name, _LATE).replace(self._file(name, _RECORD))

    def _leave_on_record(self, name: str) -> None:
        self._launched[name] = launched = self._given_up.pop(name)
        self._file(name, _LATE).replace(self._file(name, _RECORD))
        logging.getLogger(__name__).warning(
            "Node %s was released before it came; it may still come, and cost money. "
            "A resumed run releases it again; to do so now: %s",
            name,
            shlex.join(self._argv(self._commands.release, name, launched.instance, launched.number)),
        )

    def _forget(self, name: str) -> None:
        """Stop watching for a node that was released before it came."""
        if self._given_up.pop(name, None) is not None:
            self._file(name, _LATE).unlink(missing_ok=True)

    def _tidy(self) -> None:
        ended = [(name, ray_id) for name, (thread, ray_id) in self._endings.items() if not thread.is_alive()]
        for name, ray_id in ended:
            del self._endings[name]
            self._processes.pop(name, None)
            if name not in self._released:
                self._unended[name] = ray_id
                continue
            self._released.remove(name)
            self._unended.pop(name, None)
            launched = self._launched.pop(name)
            if self._may_come(ray_id):
                self._given_up[name] = launched
        late, self._late = self._late, {}
        for name, ray_id in late.items():
            self.release(name, ray_id)

    def _may_come(self, ray_id: str) -> bool:
        """Whether a released node may still come. Without a release command it ends with its process."""
        return not ray_id and bool(self._commands.release)

    def _file(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}{suffix}"

    def _log(self, name: str) -> Path:
        return self._file(name, ".log")

    def _argv(self, template: str, name: str, instance: str, number: int, ray_id: str = "") -> list[str]:
        values = {
            "address": self._address,
            "instance": instance,
            "name": name,
            "number": number,
            "slots": self._slots[instance],
            "ray_id": ray_id,
        }
        return [part.format_map(values) for part in shlex.split(template)]

    def _start(self, argv: list[str], name: str) -> subprocess.Popen[bytes]:
        with open(self._log(name), "ab", opener=private_opener) as log:
            return subprocess.Popen(  # noqa: S603 - the user's own command
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code and name not in self._unwanted:
            self._failed.add(name)
            why = f"its launch command ended with {_ended(code)}: {self._said(name)}"
            self._mailbox.post(LaunchFailed(name, why, str(self._log(name))))

    def _end(self, name: str, launched: _Launched, ray_id: str) -> None:
        if not ray_id:  # first end the launch, or the node comes after its release
            self._end_process(name, launched)
        released = not self._commands.release or self._run_release(name, launched, ray_id)
        self._end_process(name, launched)
        if not released:
            return
        if self._may_come(ray_id):
            self._file(name, _RECORD).replace(self._file(name, _LATE))
        else:
            self._file(name, _RECORD).unlink(missing_ok=True)
        if name not in self._failed:
            self._log(name).unlink(missing_ok=True)
        self._released.add(name)

    def _run_release(self, name: str, launched: _Launched, ray_id: str) -> bool:
        argv = self._argv(self._commands.release, name, launched.instance, launched.number, ray_id)
        why = ""
        for attempt in range(_RELEASE_TRIES):
            time.sleep(attempt * _RELEASE_PAUSE_S)
            try:
                process = self._start(argv, name)
            except OSError as error:
                why = f"{argv[0]} cannot be run: {error.strerror}"
                continue
            try:
                code = process.wait(_RELEASE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            if code == 0:
                return True
            why = f"It ended with {_ended(code)}: {self._said(name)}"
        logging.getLogger(__name__).warning(
            "Node %s may still be up, and cost money: its release command failed. %s. The command: %s",
            name,
            why.removesuffix("."),
            shlex.join(argv),
        )
        return False

    def _end_process(self, name: str, launched: _Launched) -> None:
        """End the process group, its leader first: `ray start` then ends the others much faster."""
        if launched.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(launched.pid, signal.SIGTERM)
        until_s = time.monotonic() + self._grace_s
        while launched.is_running() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        launched.kill_group()
        if name in self._processes:
            self._processes[name].wait()

    def _said(self, name: str) -> str:
        """The last lines that a node's commands printed."""
        text = ""
        with contextlib.suppress(OSError):  # the log is removed with the node
            text = self._log(name).read_text(encoding="utf-8", errors="replace")
        return end_of(text, _SHOWN_CHARS) or "it printed nothing"


def _warn_of(name: str, why: str) -> None:
    logging.getLogger(__name__).warning(
        "Node %s came after its release, and may cost money. End it yourself: %s.", name, why
    )


def _ended(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"


def _begun(pid: int) -> str:
    """When a process began; empty if there is none."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        if state != "Z":
            return fields[18]
    return ""


def _read_all(folder: Path, suffix: str) -> dict[str, _Launched]:
    paths = sorted(folder.glob(f"*{suffix}"))
    return {path.name.removesuffix(suffix): _read(path) for path in paths}


def _read(path: Path) -> _Launched:
    try:
        fields: Mapping[str, int | str] = read_json(path)
        return _Launched(
            int(fields["number"]), str(fields["instance"]), int(fields["pid"]), str(fields["begun"])
        )
    except (UnreadableError, TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"is damaged ({error}); it is the record of a node that may be up.",
            where=str(path),
            remedy=f"Make sure that the node {path.name.partition('.')[0]} is gone, then remove the file.",
        ) from error


def _write(path: Path, launched: _Launched) -> None:
    """Write a record atomically."""
    half = path.with_suffix(".part")
    write_private(half, json.dumps(asdict(launched)).encode())
    half.replace(path)
