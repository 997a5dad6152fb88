"""Stands between a worker and its command, so that the command never outlives the worker.

Run as a script, with the standard library only, so that it starts in milliseconds:

    python -I -S guard.py SOCKET_FD OPTIONS ARGV...

OPTIONS is JSON:

    grace_s              between SIGTERM and SIGKILL
    log, lock, metrics   files
    keys                 a report has at least one of them
    metric               the key that counts in the report of a trial
    tells_missed         whether to begin with the lines that the metrics file has
    token, start         what the command has in its environment, too

The command gets a session of its own. Its output comes here and goes to the log, which begins again when it
grows too long. Lines of standard output that may be reports go to the worker, and reports also to the metrics
file. If they come too fast, the last of several lines stands for all, except for the first line of each epoch
(see `Sieve`). Lines that the command writes to the metrics file itself go to the worker, too. In the long run
the guard reads at most `_STEADY_BYTES_PER_S`, so a command that prints without end waits, and nothing else.

The command gets SIGTERM, and SIGKILL `grace_s` later, when the worker closes its end of the socket, on
purpose or by dying. SIGUSR1 to the guard does the same `grace_s` later, unless the command ends before.
SIGUSR2 kills the command at once. The guard adopts the processes that the command leaves behind, even in
other sessions, and ends them before it leaves. If the guard itself is killed, the command dies with it.
Processes that the command had started are then found by their environment, and ended before the next guard
of the job starts anything (see `end_leftovers`).

The guard says to the worker, one per line:

    M line          the metrics file had this line before
    R line          a possible report
    F               once: lines are left out, or the command prints faster than it is read
    E number text   the command could not be started; the number is that of the error
    X code asked    the command ended; a negative code is a signal; `asked` is 1 after a request to stop
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator

TOKEN = "STRETTO_TOKEN"  # noqa: S105 - the name of a variable
"""The variable by which the processes of a job are found: the secret of the run, and the job."""
START = "STRETTO_START"
"""The variable that names the start of the job."""
LOG_BYTES = 64 << 20
"""A longer log is renamed to `.1`, which replaces an earlier one."""
_UNKILLABLE_S = 5.0
"""How long to wait for a process after SIGKILL."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_REPORT = 1 << 16
"""A longer line is no report, so that a line without end costs no memory."""
_CHUNK = 1 << 16
_LOOK_EVERY_S = 0.1
"""How often the metrics file is read, and lines that were held back are passed on."""
_METRICS_PIECE = 1 << 18
"""Bytes of the metrics file that are read at once."""
_UNREAD_BYTES = 1 << 18
"""Nothing more is read while more bytes than this wait to be sent."""
_BURST_BYTES, _STEADY_BYTES_PER_S = 16 << 20, 2 << 20
"""Output that is read at once, and the rate in the long run."""
_BURST_LINES, _STEADY_LINES_PER_S = 256, 20
"""The same for lines that a later line can replace."""
_BURST_EPOCHS, _STEADY_EPOCHS_PER_S = 2000, 200
"""The same for lines that begin an epoch. None is left out, so the command waits."""
_EPOCH = re.compile(rb'"epoch"\s*:\s*([^,}\s]+)')
Sourced = tuple[bytes, bool]
"""A line, and whether it comes from the metrics file."""


class LineBuffer:
    """Splits a stream into lines. A line that grows too long becomes an empty one."""

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


class Allowance:
    """A token bucket: a burst at first, then a steady rate."""

    def __init__(self, burst: float, per_s: float, now_s: float) -> None:
        self._most = self._left = burst
        self._per_s = per_s
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until something may pass."""
        self._left = min(self._most, self._left + self._per_s * max(now_s - self._at_s, 0.0))
        self._at_s = now_s
        return 0.0 if self._left > 0 else (1.0 - self._left) / self._per_s

    def take(self, amount: float) -> None:
        self._left -= amount


class Sieve:
    """Chooses the lines to pass on, among those that may be reports.

    Normally it passes on all. Of a flood it passes on the first line of every epoch, every line with a
    trial's metric and no epoch (which counts as one more epoch), and of the others the last one in every
    tenth of a second.
    """

    def __init__(self, keys: Iterable[str], metric: str | None, now_s: float) -> None:
        self._keys = tuple(json.dumps(key).encode() for key in keys)
        self._metric = None if metric is None else json.dumps(metric).encode()
        self._lines = Allowance(_BURST_LINES, _STEADY_LINES_PER_S, now_s)
        self._epochs = Allowance(_BURST_EPOCHS, _STEADY_EPOCHS_PER_S, now_s)
        self._seen: dict[bool, bytes] = {}
        """The last epoch that was passed on, without the metric and with it."""
        self._held: Sourced | None = None
        self._went_s = now_s
        self.has_dropped = False
        """Whether a line was left out."""

    def wait_s(self, now_s: float) -> float:
        """Seconds in which nothing more should be read."""
        return self._epochs.wait_s(now_s)

    def pass_on(self, line: bytes, now_s: float, *, is_in_file: bool = False) -> Iterator[Sourced]:
        """The lines to pass on, now that this one came."""
        if not line.startswith(b"{"):
            return
        if self._is_first(line):
            self._epochs.take(1)
        elif not self._lines.wait_s(now_s):
            self._lines.take(1)
        else:
            if any(key in line for key in self._keys):
                self.has_dropped |= self._held is not None
                self._held = line, is_in_file
            return
        yield from self.rest()
        yield line, is_in_file

    def due(self, now_s: float) -> Iterator[Sourced]:
        """A line that was held back for long enough."""
        if now_s - self._went_s >= _LOOK_EVERY_S:
            self._went_s = now_s
            yield from self.rest()

    def rest(self) -> Iterator[Sourced]:
        """A line that was held back."""
        if self._held is not None:
            held, self._held = self._held, None
            yield held

    def _is_first(self, line: bytes) -> bool:
        shows = self._metric is not None and self._metric in line
        found = _EPOCH.search(line)
        if found is None:
            return shows
        is_first = self._seen.get(shows) != found[1]
        self._seen[shows] = found[1]
        return is_first


class Log:
    """The log of a job, of bounded length."""

    def __init__(self, path: str, most_bytes: int = LOG_BYTES, mode: int = 0o600) -> None:
        self._path = path
        self._most = most_bytes
        self._mode = mode
        self.fd = _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        self._unlooked = 0

    def write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk or a lost folder is no reason to end a training run
            os.write(self.fd, text)
            self._unlooked += len(text)
            if self._unlooked >= min(_METRICS_PIECE, self._most):
                self._unlooked = 0
                self._look()

    def _look(self) -> None:
        """Rename a log that is too long. Another guard of the job may have done so."""
        mine, there = os.fstat(self.fd), os.stat(self._path)  # noqa: PTH116 - pathlib is slow
        if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
            if mine.st_size < self._most:
                return
            aside = f"{self._path}.1"
            os.replace(self._path, aside)  # noqa: PTH105 - likewise
            self._reopen()
            name = os.path.basename(aside)  # noqa: PTH119 - likewise
            os.write(self.fd, f"stretto: what comes before is in {name}, and older output is gone\n".encode())
        else:
            self._reopen()

    def _reopen(self) -> None:
        fd = _opened(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._mode)
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)


class MetricsFile:
    """The job's file of reports. The guard adds to it, and reads what others add."""

    def __init__(self, path: str, keys: list[str], mode: int = 0o600) -> None:
        self._path = path
        self._mode = mode
        self._keys = frozenset(keys)
        self._lines = LineBuffer()
        with contextlib.suppress(OSError):
            os.close(_opened(path, os.O_WRONLY | os.O_CREAT, mode))
        self._inode, self._at = self._end()

    def before(self) -> Iterator[bytes]:
        """Lines that were there already."""
        end, self._at = self._at, 0
        return self._read(until=end)

    def keep(self, line: bytes) -> Iterator[bytes]:
        """Add a line if it is a report. Yields the lines that others added before it."""
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
        """Lines that were added since the last look, at most one piece."""
        inode, end = self._end()
        self._is_now(inode)
        if end < self._at:  # begun anew
            self._at = 0
        yield from self._read(until=min(end, self._at + _METRICS_PIECE))

    def _is_now(self, inode: int) -> None:
        """Begin at the start if another file has the name now."""
        if inode != self._inode:
            self._inode, self._at = inode, 0

    def _read(self, until: int) -> Iterator[bytes]:
        if until <= self._at:
            return
        with contextlib.suppress(OSError), open(self._path, "rb") as file:  # noqa: PTH123 - pathlib is slow
            file.seek(self._at)
            while chunk := file.read(min(until - self._at, _METRICS_PIECE)):
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


class Reports:
    """Passes on printed reports and those of the metrics file, and writes the printed ones there."""

    def __init__(
        self,
        metrics: MetricsFile,
        sieve: Sieve,
        tell: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._sieve = sieve
        self._tell = tell
        self._clock = clock

    def printed(self, line: bytes) -> None:
        """A line of standard output."""
        self._go_on(self._sieve.pass_on(line, self._clock()))

    def look(self) -> None:
        """Pass on lines that others added to the metrics file."""
        self._found(self._metrics.added())

    def due(self) -> None:
        """Pass on lines that were held back for long enough."""
        self._go_on(self._sieve.due(self._clock()))

    def end(self) -> None:
        """Pass on everything that is left."""
        self.look()
        self._go_on(self._sieve.rest())

    def _go_on(self, lines: Iterator[Sourced]) -> None:
        for line, is_in_file in lines:
            if not is_in_file:
                self._found(self._metrics.keep(line))
            self._tell(line)

    def _found(self, lines: Iterator[bytes]) -> None:
        """Pass on lines of the metrics file, and write to it only after all of them were read."""
        unwritten = []
        for found in lines:
            for line, is_in_file in self._sieve.pass_on(found, self._clock(), is_in_file=True):
                self._tell(line)
                if not is_in_file:
                    unwritten.append(line)
        for line in unwritten:
            self._found(self._metrics.keep(line))


class Guard:
    """A command from its start to the end of everything that it left behind."""

    def __init__(self, socket_fd: int, log: Log, grace_s: float, metrics: MetricsFile, sieve: Sieve) -> None:
        self._socket_fd = socket_fd
        self._unsent = bytearray()
        self._log = log
        self._grace_s = grace_s
        self._metrics = metrics
        self._sieve = sieve
        self._reports = Reports(metrics, sieve, functools.partial(self._tell, b"R"))
        self._bytes = Allowance(_BURST_BYTES, _STEADY_BYTES_PER_S, time.monotonic())
        self._lines = LineBuffer()
        self._has_told_flood = False
        self._pid = 0
        """Of the command, which leads its process group."""
        self._code: int | None = None
        """The exit code of the command."""
        self._stop_asked = False
        self._stop_at_s = math.inf
        self._kill_at_s = math.inf
        os.set_blocking(socket_fd, False)
        self._wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(wake_write_fd, False)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: self._let_end())
        signal.signal(signal.SIGUSR2, lambda *_: self._end_now())

    def tell_missed(self) -> None:
        """Tell the first line of each epoch in the metrics file; others would not count."""
        told = set()
        for line in self._metrics.before():
            epoch = _EPOCH.search(line)
            if epoch is not None and epoch[1] not in told and line.startswith(b"{"):
                told.add(epoch[1])
                self._tell(b"M", line)

    def run(self, argv: list[str]) -> None:
        self._output_fd, output_fd = os.pipe()
        self._other_fd, other_fd = os.pipe()
        try:
            self._pid = self._start(argv, output_fd, other_fd)
        except OSError as error:
            self._tell(b"E", _numbered(error))
            self._flush()
            return
        os.close(output_fd)
        os.close(other_fd)
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self._other_fd, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signal(number))
        code = self._watch()
        self._signal(signal.SIGKILL)
        _end_descendants()
        for copy in (self._copy_other, self._copy_output):
            with contextlib.suppress(BlockingIOError):
                while copy():
                    pass
        self._reports.end()
        self._tell(b"X", b"%d %d" % (code, self._stop_asked))
        self._flush()

    def _start(self, argv: list[str], output_fd: int, other_fd: int) -> int:
        failure_fd, command_failure_fd = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(failure_fd)
            os.close(command_failure_fd)
            raise
        if pid == 0:
            try:
                os.setsid()
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(output_fd, 1)
                os.dup2(other_fd, 2)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
                os.execvp(argv[0], argv)  # noqa: S606 - no shell is the point
            except (OSError, ValueError) as error:
                os.write(command_failure_fd, _numbered(error))
            finally:
                os._exit(127)
        os.close(command_failure_fd)
        # Ends when the command runs: from then on its process group exists and can be signalled.
        failure = os.read(failure_fd, _CHUNK)
        os.close(failure_fd)
        if failure:
            self._tell(b"E", failure)
        return pid

    def _watch(self) -> int:
        """Serve until the command has ended; its exit code."""
        copies: dict[int, Callable[[], bool]] = {
            self._other_fd: self._copy_other,  # an error comes before what is flushed when the command ends
            self._output_fd: self._copy_output,
        }
        stops = True
        while True:
            ready = self._wait(copies, stops=stops)
            for fd in [fd for fd in copies if fd in ready]:
                if not copies[fd]():
                    del copies[fd]
            if self._wake_fd in ready:
                os.read(self._wake_fd, _CHUNK)
            if not self._sieve.wait_s(time.monotonic()):
                self._reports.look()
            self._reports.due()
            self._reap()
            if self._code is not None:
                return self._code
            if ready.get(self._socket_fd, 0) & ~select.POLLOUT:
                stops = False
                self._stop()
            if ready.get(self._socket_fd, 0) & select.POLLOUT:
                self._send()
            self._keep_time()

    def _wait(self, sources: Iterable[int], *, stops: bool) -> dict[int, int]:
        """Wait a moment for sources that may be read, or for the socket."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        listens = (select.POLLIN if stops else 0) | (select.POLLOUT if self._unsent else 0)
        if listens:
            poll.register(self._socket_fd, listens)
        now_s = time.monotonic()
        waits_s = max(self._bytes.wait_s(now_s), self._sieve.wait_s(now_s))
        if (waits_s or self._sieve.has_dropped) and not self._has_told_flood:
            self._has_told_flood = True
            self._tell(b"F", b"")
        if not waits_s and len(self._unsent) <= _UNREAD_BYTES:
            for fd in sources:
                poll.register(fd, select.POLLIN)
        within_s = min(_LOOK_EVERY_S, waits_s or _LOOK_EVERY_S)
        return dict(poll.poll(math.ceil(within_s * 1000)))

    def _let_end(self) -> None:
        self._stop_at_s = min(self._stop_at_s, time.monotonic() + self._grace_s)

    def _end_now(self) -> None:
        self._stop_asked = True
        self._kill_at_s = -math.inf

    def _stop(self) -> None:
        self._stop_at_s = math.inf
        self._stop_asked = True
        self._signal(signal.SIGTERM)
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._grace_s)

    def _keep_time(self) -> None:
        if time.monotonic() >= self._stop_at_s:
            self._stop()
        if time.monotonic() >= self._kill_at_s:
            self._signal(signal.SIGKILL)
            self._kill_at_s = math.inf

    def _reap(self) -> None:
        while self._code is None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid == self._pid:
                self._code = os.waitstatus_to_exitcode(status)

    def _signal(self, number: int) -> None:
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)
        except PermissionError:  # the command became another user; nothing more can be done from here
            self._log.write(b"stretto: no permission to signal the command\n")

    def _copy_output(self) -> bool:
        """Copy one piece, so that a command that prints without end can be stopped; False at the end."""
        chunk = self._copy(self._output_fd)
        for line in self._lines.add(chunk):
            self._reports.printed(line)
        return bool(chunk)

    def _copy_other(self) -> bool:
        return bool(self._copy(self._other_fd))

    def _copy(self, fd: int) -> bytes:
        chunk = os.read(fd, _CHUNK)
        self._bytes.take(len(chunk))
        self._log.write(chunk)
        return chunk

    def _tell(self, what: bytes, text: bytes) -> None:
        self._unsent += what + b" " + text.replace(b"\n", b" ") + b"\n"
        self._send()

    def _send(self) -> None:
        """Send as much as possible now."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._socket_fd, self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # the controller is gone
            self._unsent.clear()

    def _flush(self) -> None:
        """Send everything, and wait for it."""
        os.set_blocking(self._socket_fd, True)
        self._send()


def _numbered(error: OSError | ValueError) -> bytes:
    number = error.errno if isinstance(error, OSError) else None
    return f"{number or 0} {error}".encode()


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
    """Open a file and give it this mode; the umask belongs to the user's command."""
    fd = os.open(path, flags, mode)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(fd, mode)
    return fd


def processes_of(token: str, *, but_start: str = "") -> list[int]:
    """Processes of this user with a job's token in their environment, except those of one start."""
    mine, start = f"{TOKEN}={token}".encode(), f"{START}={but_start}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib takes long to import
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:  # noqa: PTH123 - likewise
                has = environ.read().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or is another user's
        if mine in has and not (but_start and start in has) and int(name) != os.getpid():
            found.append(int(name))
    return found


def found_before(is_gone: Callable[[], bool], find: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """Finds only processes that were there before the controller went; later ones may be its successor's."""
    known: set[int] = set()

    def found() -> list[int]:
        there = find()
        if not is_gone():
            known.update(there)
        return [pid for pid in there if pid in known]

    return found


def end_leftovers(
    find: Callable[[], list[int]],
    *,
    grace_s: float,
    kill: Callable[[int, int], None] = os.kill,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """SIGTERM to all that are found, SIGKILL to those left after the grace. Returns their number.

    It looks again until it finds none, as a process that is about to end may start another.
    """
    asked: set[int] = set()
    kill_at_s = clock() + grace_s
    while left := find():
        late = clock() >= kill_at_s
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        if clock() >= kill_at_s + grace_s + _UNKILLABLE_S:
            break  # as after a process that waits for a disk that is gone: nothing more can be done
        sleep(_LOOK_EVERY_S / 2)
    return len(asked)


def main() -> None:
    socket_fd = int(sys.argv[1])
    options = json.loads(sys.argv[2])
    os.set_inheritable(socket_fd, False)
    log = Log(options["log"], mode=options["mode"])
    is_first = not os.path.exists(options["lock"])  # noqa: PTH110 - pathlib takes long to import
    lock_fd = _opened(options["lock"], os.O_RDWR | os.O_CREAT, 0o600)  # held until this process ends
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.write(b"stretto: waiting for an earlier process of this job to end\n")
        fcntl.flock(lock_fd, fcntl.LOCK_EX)

    def is_gone() -> bool:
        """Whether the controller has gone, or changed its mind."""
        return bool(select.select([socket_fd], [], [], 0)[0])

    if not is_first and options["token"]:
        find = functools.partial(processes_of, options["token"], but_start=options["start"])
        if ended := end_leftovers(found_before(is_gone, find), grace_s=options["grace_s"]):
            log.write(b"stretto: %d processes of an earlier start of this job were ended\n" % ended)
    if not is_first and is_gone():
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    metrics = MetricsFile(options["metrics"], options["keys"], options["mode"])
    sieve = Sieve(options["keys"], options["metric"], time.monotonic())
    guard = Guard(socket_fd, log, options["grace_s"], metrics, sieve)
    if options["tells_missed"]:
        guard.tell_missed()
    guard.run(sys.argv[3:])


if __name__ == "__main__":
    main()
