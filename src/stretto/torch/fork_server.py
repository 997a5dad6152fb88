"""The fork server: imports torch and the user's code once, then forks each worker in milliseconds.

It runs as a script, by its path, so that it can explain a failed import:

    python -P fork_server.py SOCKET_FD SETTINGS

The controller holds the other end of the socket and writes JSON lines:

    {"do": "spawn", "worker": .., "address": .., "secret": .., "log": .., "env": {..}}
    {"do": "end", "worker": ..}      SIGTERM to the worker's process group, SIGKILL after the grace
    {"do": "kill", "worker": ..}     SIGKILL

and reads

    {"say": "ready", "worker": ""}                 imports are done
    {"say": "born", "worker": .., "pid": ..}       the worker was forked
    {"say": "note", "worker": .., "text": ..}      a notice for the user, sent with the first worker
    {"say": "gone", "worker": .., "code": ..}      all processes of the worker's group have ended
    {"say": "gone", "worker": .., "error": ..}     it could not be forked now; try again later
    {"say": "import-failed", "worker": .., "error": ..}   no worker can ever be forked here

When the controller closes its end or dies, workers get the grace to save a checkpoint and exit. Then they are
killed. The fork server also ends processes that workers leave behind. If it is killed itself, its workers die
with it.

A fork copies only one thread; waiting for any other in the copy would hang. So libraries use one thread while
the user's code is imported, and workers get their threads after the fork. Code that starts threads or uses
CUDA on import is not imported here, but in every worker.
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
"""How often we check during imports that the controller is still there."""
_THREAD_GRACE_S = 1.0
"""How long threads that the user's code started may take to end."""
_ONE = "01"
"""One thread, in an unusual spelling: any other value was set by the user's code."""
_THREADS_OF = {
    "openmp": "OMP_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
"""The variable from which each library reads its number of threads; OMP_NUM_THREADS is the fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerSettings:
    """What to import, and what workers run."""

    entry: str
    worker: str
    """`module:function`: the main function of a worker: (address, secret, id) -> exit code."""
    load: str
    """`module:function`: imports the user's code; takes the entry."""
    preload: tuple[str, ...]
    grace_s: float
    imports_entry: bool = True
    """Whether the user's code is imported here, once, or in every worker."""
    note: str = ""
    """If it is imported in every worker: the reason, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """A request to fork a worker."""

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
    """Its exit code, once it has ended; other processes of its group may still run."""
    kill_at_s: float = math.inf


@dataclass(slots=True)
class ForkServer:
    """Serves one controller. Single-threaded, because only such a process can fork safely."""

    line: socket.socket
    grace_s: float
    import_error: str = ""
    """Why no worker can be forked here; empty if the imports succeeded."""
    note: str = ""
    """A notice for the user; empty once sent."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _unread: bytes = b""
    _closed: bool = False

    def serve(self) -> SpawnRequest | None:
        """Serve until the controller and all workers are gone: None. In a forked worker: its request."""
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
                    request = self._carry_out(order)
                    if request is not None:
                        os.close(wake_fd)
                        os.close(wake_write_fd)
                        return request
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
                _signal_group(worker.pid, signal.SIGCONT)  # a stopped process would not handle SIGTERM
                worker.kill_at_s = min(worker.kill_at_s, time.monotonic() + self.grace_s)
            else:
                _signal_group(worker.pid, signal.SIGKILL)
        return None

    def _spawn(self, request: SpawnRequest) -> SpawnRequest | None:
        if self.import_error:
            self._say(say="import-failed", worker=request.worker, error=self.import_error)
            return None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            begun_fd, begun_write_fd, pid = _fork()
        except OSError as error:  # out of memory, processes or file descriptors
            why = f"a worker cannot be started: {error}"
            self._say(say="gone", worker=request.worker, error=why, number=error.errno or 0)
            return None
        if pid == 0:
            os.close(begun_fd)
            self._become_worker(request)
            os.close(begun_write_fd)
            return request
        os.close(begun_write_fd)
        os.read(begun_fd, 1)  # returns when the worker leads its own process group and can be signalled
        os.close(begun_fd)
        self._workers[request.worker] = _Worker(request.worker, pid)
        self._say(say="born", worker=request.worker, pid=pid)
        if self.note:
            self._say(say="note", worker=request.worker, text=self.note)
            self.note = ""
        return None

    def _become_worker(self, request: SpawnRequest) -> None:
        """In the child: drop the fork server's signal handlers, socket and output."""
        parent = os.getppid()
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the fork server died before that took effect
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.line.close()
        log_fd = open_private(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps a killed worker's output

    def _reap(self) -> None:
        """Collect exit codes; a worker is gone when its whole process group is."""
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
            return 10.0  # grandchildren may end without a signal to us
        first_s = min((worker.kill_at_s for worker in self._workers.values()), default=math.inf)
        return None if math.isinf(first_s) else max(first_s - time.monotonic(), 0.0) * 1000 + 1

    def _say(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the controller is gone
            self.line.sendall(json.dumps(fields).encode() + b"\n")


def _fork() -> tuple[int, int, int]:
    """Both ends of a pipe shared by parent and child, and the result of `os.fork`."""
    ends = os.pipe()
    try:
        return (*ends, os.fork())
    except OSError:
        for end in ends:
            os.close(end)
        raise


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; False if the group has ended."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # ended, or it runs as another user now
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_descendants() -> None:
    """Kill and reap all processes that workers left behind."""
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
    """The object named `module:name`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


class LibraryThreads:
    """Threads of numerical libraries: one during imports; in workers, as the environment says."""

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _THREADS_OF.values()}
        self._chosen: int | None = None
        """The argument of `torch.set_num_threads`, if the user's code called it on import."""
        self._libraries: list[Any] = []
        os.environ.update(dict.fromkeys(_THREADS_OF.values(), _ONE))

    @contextlib.contextmanager
    def noting_choices(self) -> Iterator[None]:
        """Record calls of `torch.set_num_threads` in the block, and then which libraries are loaded."""
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
            from threadpoolctl import ThreadpoolController  # noqa: PLC0415 - only with torch

            self._libraries = [one for one in ThreadpoolController().lib_controllers if one.num_threads == 1]

    def restore_environment(self) -> None:
        """Restore the variables, except those that the user's code has set."""
        for name, value in self._before.items():
            if os.environ.get(name) != _ONE:
                continue
            del os.environ[name]
            if value is not None:
                os.environ[name] = value

    def give(self) -> None:
        """In a worker: give each library its threads."""
        for library in self._libraries:
            library.set_num_threads(_number_of_threads(_THREADS_OF.get(library.internal_api, "")))
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(self._chosen or _number_of_threads(_THREADS_OF["mkl"]))


def _number_of_threads(name: str) -> int:
    """Threads of a library that reads the variable `name`; the first number of a list counts."""
    for text in (os.environ.get(name, ""), os.environ.get(_THREADS_OF["openmp"], "")):
        first = text.partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return len(os.sched_getaffinity(0))


def _prepare(settings: ForkServerSettings, threads: LibraryThreads) -> str:
    """Import everything. Returns what failed: a sentence or the user's traceback; empty if nothing did."""
    try:
        for module in settings.preload:
            importlib.import_module(module)
        for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # noqa: SLF001
            finalizer.atexit = False  # else torch would unregister its operators in every worker that exits
        named(settings.worker)
        with threads.noting_choices():
            if settings.imports_entry:
                named(settings.load)(settings.entry)
    except InputError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - users read their own errors
        return _own_traceback(error)
    return ""


def _own_traceback(error: BaseException) -> str:
    """The traceback without our own frames and those of importlib."""
    machinery = (str(Path(__file__).parent), "<frozen importlib")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(machinery):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _points_to(link: Path, device: str) -> bool:
    with contextlib.suppress(OSError):  # the file descriptor may be closed by now
        return str(link.readlink()) == device
    return False


def _unsafe_to_fork() -> str:
    """Why this process cannot fork safely; empty if it can."""
    if any(_points_to(link, "/dev/nvidia-uvm") for link in Path("/proc/self/fd").iterdir()):
        return "it uses CUDA when it is imported"
    end_s = time.monotonic() + _THREAD_GRACE_S
    while (others := _other_threads()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return f"it starts threads when it is imported ({', '.join(others)})" if others else ""


def _other_threads() -> list[str]:
    """Names of all other threads, including those that Python did not start."""
    own = threading.get_native_id()
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != own:
            with contextlib.suppress(OSError):  # it has ended
                comm = (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
                names.append(known.get(int(task.name), comm))
    return sorted(set(names))


@contextlib.contextmanager
def _exiting_if_abandoned(line: socket.socket) -> Iterator[None]:
    """Exit if the controller goes away during the imports, which take seconds."""

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
    """Restart this process without importing the user's code: workers import it, which is slower.

    If there are threads even then, workers import everything.
    """
    note = f"every worker imports {settings.entry} itself, which takes longer, because {why}"
    if settings.imports_entry:
        less = replace(settings, imports_entry=False, note=note)
    else:
        less = replace(settings, preload=())
    sys.stderr.write(f"stretto: {note}.\n")
    sys.stderr.flush()
    os.set_inheritable(fd, True)
    arguments = json.dumps(asdict(less))
    os.execv(sys.executable, [sys.executable, "-P", __file__, str(fd), arguments])  # noqa: S606 - without a shell


def _run_worker(worker: Callable[[str, str, str], int | None], request: SpawnRequest) -> NoReturn:
    """Run a worker, then exit at once: a regular shutdown of the interpreter would occupy the slot longer."""
    code = 1
    try:
        code = worker(request.address, request.secret, request.worker) or 0
    except BaseException:  # noqa: BLE001 - printed, and shown by the exit code
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as in a regular exit: wait for threads,
    atexit._run_exitfuncs()  # noqa: SLF001 - then run the user's exit handlers
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    fd, settings = int(sys.argv[1]), ForkServerSettings(**json.loads(sys.argv[2]))
    sys.argv = [settings.entry.rpartition(":")[0] or settings.entry]  # as in `python FILE`
    os.set_inheritable(fd, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    line = socket.socket(fileno=fd)
    threads = LibraryThreads()
    with _exiting_if_abandoned(line):
        import_error = _prepare(settings, threads)
    why = _unsafe_to_fork() if not import_error and (settings.imports_entry or settings.preload) else ""
    if why:
        threads.restore_environment()
        _start_over(fd, settings, why)
    gc.freeze()  # workers share these objects; their garbage collector need not visit them
    request = ForkServer(line, settings.grace_s, import_error, settings.note).serve()
    if request is None:
        os._exit(0)  # exit handlers of the user's code run in workers only
    threads.restore_environment()
    os.environ.update(request.env)
    threads.give()
    _run_worker(named(settings.worker), request)


if __name__ == "__main__":
    main()
