"""Forks workers from a process that has imported everything already, in milliseconds each.

Run as a script by its path, so that it can say in words why an import failed:

    python -P fork_server.py SOCKET_FD SETTINGS

The controller has the other end of the socket and writes JSON lines to it:

    {"do": "spawn", "worker": .., "address": .., "secret": .., "log": .., "env": {..}}
    {"do": "end", "worker": ..}      SIGTERM to the worker's process group, SIGKILL after the grace
    {"do": "kill", "worker": ..}     SIGKILL

and reads

    {"say": "ready", "worker": ""}   everything is imported
    {"say": "born", "worker": .., "pid": ..}
    {"say": "note", "worker": .., "text": ..}      how workers are started here, once, with the first of them
    {"say": "gone", "worker": .., "code": ..}      nothing of its process group is left
    {"say": "gone", "worker": .., "error": ..}     it could not be started; another time it may
    {"say": "barren", "worker": .., "error": ..}   it cannot be started, now or later

When the controller closes its end, on purpose or by dying, the workers, who notice that too, have the grace
to save their state and leave; then they are killed. The nursery adopts and ends what they leave behind.
If the nursery is killed, its workers go with it.

A fork copies one thread only, and whoever waits for another in the copy waits forever. So libraries have one
thread while the user's code is imported, and workers are given theirs after the fork. Code that starts
threads of its own, or CUDA, is not imported here, but by every worker for itself.
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
from stretto.system.private_files import open_private

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
_LOOK_S = 0.25
"""How often a nursery that is still importing looks whether anybody is waiting for it."""
_LAST_MOMENTS_S = 1.0
"""How long threads that the user's code has started may take to end by themselves."""
_ONE = "01"
"""One thread, written as nobody writes it: what the user's code sets meanwhile is told from it."""
_THREADS_OF = {
    "openmp": "OMP_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
"""Where each kind of library looks for its number of threads; without an own one, all look for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerSettings:
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
    note: str = ""
    """Why not, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
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
class ForkServer:
    """Serves one controller. Single-threaded, as only that can fork safely."""

    line: socket.socket
    grace_s: float
    barren: str = ""
    """Why no worker can be started here; empty if they can."""
    note: str = ""
    """What the user should know of workers here, until it is told."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _unread: bytes = b""
    _closed: bool = False

    def serve(self) -> SpawnRequest | None:
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

    def _carry_out(self, order: dict[str, Any]) -> SpawnRequest | None:
        what = order.pop("do")
        if what == "spawn":
            return self._spawn(SpawnRequest(**order))
        worker = self._workers.get(order["worker"])
        if worker is not None and worker.code is None:
            if what == "end":
                _signal_group(worker.pid, signal.SIGTERM)
                _signal_group(worker.pid, signal.SIGCONT)  # a stopped process would not hear it
                worker.kill_at_s = min(worker.kill_at_s, time.monotonic() + self.grace_s)
            else:
                _signal_group(worker.pid, signal.SIGKILL)
        return None

    def _spawn(self, birth: SpawnRequest) -> SpawnRequest | None:
        if self.barren:
            self._say(say="barren", worker=birth.worker, error=self.barren)
            return None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            begun_fd, begun_write_fd, pid = _fork()
        except OSError as error:  # the machine has no memory, processes or descriptors left for another
            why = f"a worker cannot be started: {error}"
            self._say(say="gone", worker=birth.worker, error=why, number=error.errno or 0)
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
        if self.note:
            self._say(say="note", worker=birth.worker, text=self.note)
            self.note = ""
        return None

    def _leave_the_nest(self, birth: SpawnRequest) -> None:
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
        log_fd = open_private(birth.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
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


class LibraryThreads:
    """The threads of libraries: one while code is imported, and for workers what the environment says."""

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _THREADS_OF.values()}
        self._chosen: int | None = None
        """What the user's code has asked of torch while it was imported."""
        self._libraries: list[Any] = []
        os.environ.update(dict.fromkeys(_THREADS_OF.values(), _ONE))

    @contextlib.contextmanager
    def noting_choices(self) -> Iterator[None]:
        """Take note of what the block asks of torch; and then of the libraries that are loaded."""
        torch = sys.modules.get("torch")
        if torch is None:
            yield
            return
        set_number = torch.set_num_threads

        def note(number: int) -> None:
            set_number(number)
            self._chosen = number

        torch.set_num_threads = note  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.set_num_threads = set_number  # type: ignore[attr-defined]
            from threadpoolctl import ThreadpoolController  # noqa: PLC0415 - commands do without

            self._libraries = [one for one in ThreadpoolController().lib_controllers if one.num_threads == 1]

    def restore_environment(self) -> None:
        """As it was, but for what the user's code has set."""
        for name, value in self._before.items():
            if os.environ.get(name) != _ONE:
                continue
            del os.environ[name]
            if value is not None:
                os.environ[name] = value

    def give(self) -> None:
        """To a worker, whose libraries were loaded with one."""
        for library in self._libraries:
            library.set_num_threads(_number_of_threads(_THREADS_OF.get(library.internal_api, "")))
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(self._chosen or _number_of_threads(_THREADS_OF["mkl"]))


def _number_of_threads(name: str) -> int:
    """What a library takes that looks there first; of a list, for nested loops, the first number counts."""
    for text in (os.environ.get(name, ""), os.environ.get(_THREADS_OF["openmp"], "")):
        first = text.partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return len(os.sched_getaffinity(0))


def _prepare(settings: ForkServerSettings, threads: LibraryThreads) -> str:
    """Import everything; what went wrong, in words or as the user's own traceback."""
    try:
        for module in settings.preload:
            importlib.import_module(module)
        for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # noqa: SLF001
            finalizer.atexit = False  # torch would take its operators apart in every worker that ends
        named(settings.worker)
        with threads.noting_choices():
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
    end_s = time.monotonic() + _LAST_MOMENTS_S
    while (others := _other_threads()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return f"it starts threads when it is imported ({', '.join(others)})" if others else ""


def _other_threads() -> list[str]:
    """Names of all but this one, also of those that Python knows nothing of."""
    own = threading.get_native_id()
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != own:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                comm = (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
                names.append(known.get(int(task.name), comm))
    return sorted(set(names))


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


def _start_over(fd: int, settings: ForkServerSettings, why: str) -> None:
    """As a process that leaves the user's code to the workers, who then start more slowly.

    Where that had threads all the same, everything is left to them.
    """
    note = f"{settings.entry} is imported anew by every worker, which takes longer, because {why}"
    if settings.imports_entry:
        less = replace(settings, imports_entry=False, note=note)
    else:
        less = replace(settings, preload=())
    sys.stderr.write(f"stretto: {note}.\n")
    sys.stderr.flush()
    os.set_inheritable(fd, True)
    arguments = json.dumps(asdict(less))
    os.execv(sys.executable, [sys.executable, "-P", __file__, str(fd), arguments])  # noqa: S606 - no shell is meant


def _play(worker: Callable[[str, str, str], int | None], birth: SpawnRequest) -> NoReturn:
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
    fd, settings = int(sys.argv[1]), ForkServerSettings(**json.loads(sys.argv[2]))
    sys.argv = [settings.entry.rpartition(":")[0] or settings.entry]  # as `python FILE` would have it
    os.set_inheritable(fd, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    line = socket.socket(fileno=fd)
    threads = LibraryThreads()
    with _leaving_if_abandoned(line):
        barren = _prepare(settings, threads)
    why = _unsafe_to_fork() if not barren and (settings.imports_entry or settings.preload) else ""
    if why:
        threads.restore_environment()
        _start_over(fd, settings, why)
    gc.freeze()  # workers share what is there now, and need not look through it
    birth = ForkServer(line, settings.grace_s, barren, settings.note).serve()
    if birth is None:
        os._exit(0)  # what user code wants done at exit concerns its workers
    threads.restore_environment()
    os.environ.update(birth.env)
    threads.give()
    _play(named(settings.worker), birth)


if __name__ == "__main__":
    main()
