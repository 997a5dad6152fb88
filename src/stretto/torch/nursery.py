"""Forks workers from a process that has imported everything already, in milliseconds each.

Run as a script by its path, so that it can say in words why an import failed:

    python -P nursery.py SOCKET_FD SETTINGS

The controller has the other end of the socket and writes JSON lines to it:

    {"do": "spawn", "worker": .., "address": .., "secret": .., "log": .., "env": {..}}
    {"do": "end", "worker": ..}      SIGTERM to the worker's process group, SIGKILL after the grace
    {"do": "kill", "worker": ..}     SIGKILL

and reads

    {"say": "ready", "worker": ""}   everything is imported
    {"say": "born", "worker": .., "pid": ..}
    {"say": "gone", "worker": .., "code": ..}      nothing of its process group is left
    {"say": "gone", "worker": .., "error": ..}     it could not be started; another time it may
    {"say": "barren", "worker": .., "error": ..}   it cannot be started, now or later

When the controller closes its end, on purpose or by dying, the workers, who notice that too, have the grace
to save their state and leave; then they are killed. The nursery adopts and ends what they leave behind.
If the nursery is killed, its workers go with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from stretto.core.errors import InputError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
_LOOK_S = 0.25
"""How often a nursery that is still importing looks whether anybody is waiting for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to prepare."""

    entry: str
    worker: str
    """`module:function`, called with address, secret and id in every worker; returns its exit code."""
    load: str
    """`module:function`, called with the entry to import the user's code."""
    preload: tuple[str, ...]
    grace_s: float
    imports_entry: bool = True
    """Whether the user's code is imported here, once, or by every worker for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """A worker that is wanted."""

    worker: str
    address: str
    secret: str
    log: str
    env: dict[str, str]


@dataclass(slots=True)
class _Worker:
    name: str
    pid: int
    code: int | None = None
    """How it ended, while something of its group is still there."""
    kill_at_s: float = math.inf


@dataclass(slots=True)
class Nursery:
    """Serves one controller. Single-threaded, as only that can fork safely."""

    line: socket.socket
    grace_s: float
    barren: str = ""
    """Why no worker can be started here; empty if they can."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _unread: bytes = b""
    _closed: bool = False

    def serve(self) -> Birth | None:
        """Until the controller is gone and nothing is left; or, in a worker just forked, its part to play."""
        wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(wake_fd, False)
        os.set_blocking(wake_write_fd, False)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        poll.register(self.line, select.POLLIN)
        self._say(say="ready", worker="")
        while self._workers or not self._closed:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            with contextlib.suppress(BlockingIOError):
                os.read(wake_fd, _CHUNK)
            if self.line.fileno() in ready:
                for order in self._orders():
                    birth = self._carry_out(order)
                    if birth is not None:
                        os.close(wake_fd)
                        os.close(wake_write_fd)
                        return birth
                if self._closed:
                    poll.unregister(self.line)
            self._reap()
            self._kill_overdue()
        _end_descendants()
        return None

    def _orders(self) -> Iterator[dict[str, Any]]:
        try:
            chunk = self.line.recv(_CHUNK)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._closed = True
            for worker in self._workers.values():
                worker.kill_at_s = min(worker.kill_at_s, time.monotonic() + self.grace_s)
            return
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for text in lines:
            yield json.loads(text)

    def _carry_out(self, order: dict[str, Any]) -> Birth | None:
        what = order.pop("do")
        if what == "spawn":
            return self._spawn(Birth(**order))
        worker = self._workers.get(order["worker"])
        if worker is not None and worker.code is None:
            if what == "end":
                _signal_group(worker.pid, signal.SIGTERM)
                _signal_group(worker.pid, signal.SIGCONT)  # a stopped process would not hear it
                worker.kill_at_s = min(worker.kill_at_s, time.monotonic() + self.grace_s)
            else:
                _signal_group(worker.pid, signal.SIGKILL)
        return None

    def _spawn(self, birth: Birth) -> Birth | None:
        if self.barren:
            self._say(say="barren", worker=birth.worker, error=self.barren)
            return None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            begun_fd, begun_write_fd, pid = _fork()
        except OSError as error:  # the machine has no memory, processes or descriptors left for another
            self._say(say="gone", worker=birth.worker, error=f"a worker cannot be started: {error}")
            return None
        if pid == 0:
            os.close(begun_fd)
            self._leave_the_nest(birth)
            os.close(begun_write_fd)
            return birth
        os.close(begun_write_fd)
        os.read(begun_fd, 1)  # ends when the worker leads a group of its own, which can then be signalled
        os.close(begun_fd)
        self._workers[birth.worker] = _Worker(birth.worker, pid)
        self._say(say="born", worker=birth.worker, pid=pid)
        return None

    def _leave_the_nest(self, birth: Birth) -> None:
        """Nothing of the nursery is left in the worker: its signals, its socket, its output."""
        parent = os.getppid()
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the nursery died before that took effect
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.line.close()
        os.environ.update(birth.env)
        log_fd = os.open(birth.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker's output counts

    def _reap(self) -> None:
        """Take note of whoever ended; a worker is gone when its whole group is."""
        by_pid = {worker.pid: worker for worker in self._workers.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in by_pid:
                by_pid[pid].code = os.waitstatus_to_exitcode(status)
        for worker in [worker for worker in self._workers.values() if worker.code is not None]:
            if not _signal_group(worker.pid, signal.SIGKILL):
                del self._workers[worker.name]
                self._say(say="gone", worker=worker.name, code=worker.code)

    def _kill_overdue(self) -> None:
        for worker in self._workers.values():
            if time.monotonic() >= worker.kill_at_s:
                worker.kill_at_s = math.inf
                _signal_group(worker.pid, signal.SIGKILL)

    def _patience_ms(self) -> float | None:
        if any(worker.code is not None for worker in self._workers.values()):
            return 10.0  # the rest of a group may end without a signal to us
        first_s = min((worker.kill_at_s for worker in self._workers.values()), default=math.inf)
        return None if math.isinf(first_s) else max(first_s - time.monotonic(), 0.0) * 1000 + 1

    def _say(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self.line.sendall(json.dumps(fields).encode() + b"\n")


def _fork() -> tuple[int, int, int]:
    """Both ends of a pipe that parent and child share, and what `os.fork` says."""
    ends = os.pipe()
    try:
        return (*ends, os.fork())
    except OSError:
        for end in ends:
            os.close(end)
        raise


def _signal_group(pid: int, number: int) -> bool:
    """Whether there was anybody to signal."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # it became another user's; nothing more can be done from here
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_descendants() -> None:
    """Kill and reap what workers left to us until nothing is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def named(where: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _prepare(settings: Settings) -> str:
    """Import everything; what went wrong, in words or as the user's own traceback."""
    try:
        for module in settings.preload:
            importlib.import_module(module)
        for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # noqa: SLF001
            finalizer.atexit = False  # torch would take its operators apart in every worker that ends
        named(settings.worker)
        if settings.imports_entry:
            named(settings.load)(settings.entry)
    except InputError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raises is theirs to read
        return _own_traceback(error)
    return ""


def _own_traceback(error: BaseException) -> str:
    """Without the frames between the nursery and the user's file."""
    machinery = (str(Path(__file__).parent), "<frozen importlib")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(machinery):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _points_to(link: Path, device: str) -> bool:
    with contextlib.suppress(OSError):  # the descriptor of this very look is gone by now
        return str(link.readlink()) == device
    return False


def _unsafe_to_fork() -> str:
    """Why a fork of this process might not work; empty if it will."""
    if any(_points_to(link, "/dev/nvidia-uvm") for link in Path("/proc/self/fd").iterdir()):
        return "it uses CUDA when it is imported"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"it starts threads when it is imported ({', '.join(others)})" if others else ""


@contextlib.contextmanager
def _leaving_if_abandoned(line: socket.socket) -> Iterator[None]:
    """Importing takes seconds; a controller that is gone meanwhile leaves nothing to do."""

    def look(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                gone = not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except ConnectionError:
                gone = True
            if gone:
                os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _start_over(fd: int, settings: Settings, why: str) -> None:
    """As a process that leaves the user's code to the workers, who then start more slowly."""
    sys.stderr.write(f"stretto: {settings.entry} is imported anew by every worker, as {why}.\n")
    sys.stderr.flush()
    os.set_inheritable(fd, True)
    arguments = json.dumps(asdict(replace(settings, imports_entry=False)))
    os.execv(sys.executable, [sys.executable, "-P", __file__, str(fd), arguments])  # noqa: S606 - no shell is meant


def _play(worker: Callable[[str, str, str], int | None], birth: Birth) -> NoReturn:
    """Be a worker to the end, which comes at once: taking the interpreter apart would hold the slot."""
    code = 1
    try:
        code = worker(birth.address, birth.secret, birth.worker) or 0
    except BaseException:  # noqa: BLE001 - it is printed and the exit code tells
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as an interpreter ends: first threads,
    atexit._run_exitfuncs()  # noqa: SLF001 - then what user code wants done at exit
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    fd, settings = int(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    os.set_inheritable(fd, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    line = socket.socket(fileno=fd)
    with _leaving_if_abandoned(line):
        barren = _prepare(settings)
    why = "" if barren or not settings.imports_entry else _unsafe_to_fork()
    if why:
        _start_over(fd, settings, why)
    gc.freeze()  # workers share what is there now, and need not look through it
    birth = Nursery(line, settings.grace_s, barren).serve()
    if birth is None:
        os._exit(0)  # what user code wants done at exit concerns its workers
    _play(named(settings.worker), birth)


if __name__ == "__main__":
    main()
