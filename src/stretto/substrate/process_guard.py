"""Stands between a controller and the processes of one job, so that they never outlive the controller.

Run as a script, with the standard library only, so that it starts in milliseconds:

    python -I -S process_guard.py SOCKET_FD OPTIONS ARGV...

OPTIONS is JSON: `grace_s`, the files `log`, `lock` and `metrics`, `ranks` with the environment that each
process of ARGV has beyond the common one, `keys`, of which a report has at least one, and `tells_missed`.

Every process gets a session of its own. The standard output of the first comes here: all of it goes to
the log, lines that may be reports go to the controller, and reports also to the metrics file. What
processes write to that file themselves goes to the controller too. When one fails, the others get SIGTERM,
and SIGKILL `grace_s` later; so do all when the controller closes its end of the socket, on purpose or by
dying, or `grace_s` after the guard got SIGUSR1, unless they end by themselves before that. SIGUSR2 has them
killed at once. The guard adopts whatever they leave behind, even in other sessions, and ends that too before
it goes. Should the guard itself be killed, the processes go with it.

To the controller it says, one per line: `M` and a line that was in the metrics file before, if it wants to
hear what it may have missed; `R` and a possible report; `E` and why a process could not be started; `X`
and the exit code (negative: the signal) with `1` if a stop had been asked for, else `0`, and the rank whose
exit code it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_REPORT = 1 << 16
"""A longer line is not a report, so that a command that never ends its line costs no memory."""
_CHUNK = 1 << 16
_LOOK_EVERY_S = 0.1
"""How often the metrics file is looked at."""


class Lines:
    """Whole lines of a stream of pieces; one that grows too long is given up (an empty line is left)."""

    def __init__(self) -> None:
        self._line = bytearray()

    def add(self, chunk: bytes) -> Iterator[bytes]:
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            self._line += part
            if len(self._line) <= _LONGEST_REPORT:
                yield bytes(self._line).strip()
            self._line.clear()
        if len(self._line) <= _LONGEST_REPORT:
            self._line += rest


class MetricsFile:
    """The job's file of reports, to which the guard adds and of which it reads what others add."""

    def __init__(self, path: str, keys: list[str], mode: int = 0o600) -> None:
        self._path = path
        self._mode = mode
        self._keys = frozenset(keys)
        self._lines = Lines()
        with contextlib.suppress(OSError):
            os.close(_opened(path, os.O_WRONLY | os.O_CREAT, mode))
        self._inode, self._at = self._end()

    def before(self) -> Iterator[bytes]:
        """Lines that were there already."""
        end, self._at = self._at, 0
        return self._read(until=end)

    def keep(self, line: bytes) -> Iterator[bytes]:
        """Add a line if it is a report; lines that others added before it."""
        if not self._is_report(line):
            return
        yield from self.added()
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._mode)
        except OSError:  # a full disk or a lost folder is no reason to end a training run
            return
        try:
            self._is_now(os.fstat(handle).st_ino)
            written = os.write(handle, line + b"\n")
            end = os.lseek(handle, 0, os.SEEK_CUR)
        except OSError:
            return
        finally:
            os.close(handle)
        yield from self._read(until=end - written)
        self._at = end

    def added(self) -> Iterator[bytes]:
        """Lines that were added since the last look."""
        inode, end = self._end()
        self._is_now(inode)
        if end < self._at:  # begun anew
            self._at = 0
        yield from self._read(until=end)

    def _is_now(self, inode: int) -> None:
        """Another file may have been given the name."""
        if inode != self._inode:
            self._inode, self._at = inode, 0

    def _read(self, until: int) -> Iterator[bytes]:
        if until <= self._at:
            return
        with contextlib.suppress(OSError), open(self._path, "rb") as file:  # noqa: PTH123 - pathlib is slow
            file.seek(self._at)
            chunk = file.read(until - self._at)
            self._at += len(chunk)
            yield from self._lines.add(chunk)

    def _end(self) -> tuple[int, int]:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - likewise
        except OSError:
            return 0, 0
        return status.st_ino, status.st_size

    def _is_report(self, line: bytes) -> bool:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            return False
        return isinstance(values, dict) and not self._keys.isdisjoint(values)


class Guard:
    """The processes of one job from their start to the end of everything they left behind."""

    def __init__(self, socket_fd: int, log_fd: int, grace_s: float, metrics: MetricsFile) -> None:
        self._socket_fd = socket_fd
        self._log_fd = log_fd
        self._grace_s = grace_s
        self._metrics = metrics
        self._lines = Lines()
        self._ranks: dict[int, int] = {}
        """Those that run, by process id."""
        self._ended: tuple[int, int] | None = None
        """The first failure, or else the last end: exit code and rank."""
        self._stop_asked = False
        self._stop_at_s = math.inf
        self._kill_at_s = math.inf
        self._wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(wake_write_fd, False)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: self._let_end())
        signal.signal(signal.SIGUSR2, lambda *_: self._end_now())

    def tell_missed(self) -> None:
        self._pass_on(self._metrics.before(), b"M")

    def run(self, argv: list[str], ranks: list[dict[str, str]]) -> None:
        self._output_fd, output_fd = os.pipe()
        for rank, env in enumerate(ranks):
            pid = self._start(argv, env, output_fd if rank == 0 else self._log_fd)
            self._ranks[pid] = rank
        started = list(self._ranks)
        os.close(output_fd)
        os.set_blocking(self._output_fd, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signal(list(self._ranks), number))
        code, rank = self._watch()
        self._signal(started, signal.SIGKILL)
        _end_descendants()
        with contextlib.suppress(BlockingIOError):
            while self._copy_output():
                pass
        self._pass_on(self._metrics.added())
        self._tell(b"X", b"%d %d %d" % (code, self._stop_asked, rank))

    def _start(self, argv: list[str], env: dict[str, str], output_fd: int) -> int:
        failure_fd, command_failure_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(output_fd, 1)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
                os.execvpe(argv[0], argv, {**os.environ, **env})  # noqa: S606 - no shell is the point
            except (OSError, ValueError) as error:
                os.write(command_failure_fd, str(error).encode())
            finally:
                os._exit(127)
        os.close(command_failure_fd)
        # Ends when the command runs: from then on its process group exists and can be signalled.
        failure = os.read(failure_fd, _CHUNK)
        os.close(failure_fd)
        if failure:
            self._tell(b"E", failure)
        return pid

    def _watch(self) -> tuple[int, int]:
        """Serve until all processes have ended; the exit code that counts, and whose it is."""
        poll = select.poll()
        for fd in (self._wake_fd, self._output_fd, self._socket_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_LOOK_EVERY_S * 1000)}
            if self._output_fd in ready and not self._copy_output():
                poll.unregister(self._output_fd)
            if self._wake_fd in ready:
                os.read(self._wake_fd, _CHUNK)
            self._pass_on(self._metrics.added())
            self._reap()
            if not self._ranks and self._ended is not None:
                return self._ended
            if self._socket_fd in ready:
                poll.unregister(self._socket_fd)
                self._stop()
            self._keep_time()

    def _let_end(self) -> None:
        self._stop_at_s = min(self._stop_at_s, time.monotonic() + self._grace_s)

    def _end_now(self) -> None:
        self._stop_asked = True
        self._kill_at_s = -math.inf

    def _stop(self) -> None:
        self._stop_at_s = math.inf
        self._stop_asked = True
        self._end_gang()

    def _keep_time(self) -> None:
        if time.monotonic() >= self._stop_at_s:
            self._stop()
        if time.monotonic() >= self._kill_at_s:
            self._signal(list(self._ranks), signal.SIGKILL)
            self._kill_at_s = math.inf

    def _reap(self) -> None:
        """Take note of whoever ended; if one of the job's processes failed, the others must end too."""
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            if self._ended is None or self._ended[0] == 0:
                self._ended = (code, rank)
                if code and self._ranks and not self._stop_asked:
                    self._end_gang()

    def _end_gang(self) -> None:
        self._signal(list(self._ranks), signal.SIGTERM)
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._grace_s)

    def _signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            try:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)
            except PermissionError:  # the command became another user; nothing more can be done from here
                self._log(b"stretto: no permission to signal the command\n")

    def _log(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end a training run
            os.write(self._log_fd, text)

    def _copy_output(self) -> bool:
        """Pass on one piece, as a command that never falls silent must be stoppable; False at the end."""
        chunk = os.read(self._output_fd, _CHUNK)
        self._log(chunk)
        for line in self._lines.add(chunk):
            if line.startswith(b"{"):
                self._pass_on(self._metrics.keep(line))
                self._tell(b"R", line)
        return bool(chunk)

    def _pass_on(self, lines: Iterator[bytes], what: bytes = b"R") -> None:
        for line in lines:
            if line.startswith(b"{"):
                self._tell(what, line)

    def _tell(self, what: bytes, text: bytes) -> None:
        left = what + b" " + text.replace(b"\n", b" ") + b"\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the controller is gone
            while left:
                left = left[os.write(self._socket_fd, left) :]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_descendants() -> None:
    """Kill and reap what the command left to us until nothing is left."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            continue
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children() -> list[int]:
    me = str(os.getpid()).encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib takes long to import
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123 - likewise
                after_name = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if after_name[1] == me:
            found.append(int(name))
    return found


def _opened(path: str, flags: int, mode: int) -> int:
    """Of this mode whatever the umask is, which belongs to the user's command."""
    fd = os.open(path, flags, mode)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(fd, mode)
    return fd


def main() -> None:
    socket_fd = int(sys.argv[1])
    options = json.loads(sys.argv[2])
    os.set_inheritable(socket_fd, False)
    log_fd = _opened(options["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, options["mode"])
    lock_fd = _opened(options["lock"], os.O_RDWR | os.O_CREAT, 0o600)  # held until this process ends
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(log_fd, b"stretto: waiting for an earlier process of this job to end\n")
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if select.select([socket_fd], [], [], 0)[0]:
            return  # the controller has gone or changed its mind meanwhile
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    metrics = MetricsFile(options["metrics"], options["keys"], options["mode"])
    guard = Guard(socket_fd, log_fd, options["grace_s"], metrics)
    if options["tells_missed"]:
        guard.tell_missed()
    guard.run(sys.argv[3:], options["ranks"])


if __name__ == "__main__":
    main()
