"""Stands between a controller and one command, so that the command never outlives the controller.

Run as a script, with the standard library only, so that it starts in milliseconds:

    python -I -S process_guard.py SOCKET_FD GRACE_S LOG LOCK ARGV...

The command gets a session of its own. Its standard output comes here: all of it goes to the log, and
lines that may be reports go to the controller. When the controller closes its end of the socket, on
purpose or by dying, the command's process group gets SIGTERM, and SIGKILL `GRACE_S` later. The guard
adopts whatever the command leaves behind, even in other sessions, and ends that too before it goes.
Should the guard itself be killed, the command goes with it.

To the controller it says, one per line: `R` and a possible report, `E` and why the command could not be
started, `X` and the exit code (negative: the signal) with `1` if a stop had been asked for, else `0`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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


class Guard:
    """One command from its start to the end of everything it left behind."""

    def __init__(self, socket_fd: int, log_fd: int, grace_s: float) -> None:
        self._socket_fd = socket_fd
        self._log_fd = log_fd
        self._grace_s = grace_s
        self._line = bytearray()
        self._stop_asked = False
        self._kill_at_s = math.inf
        self._wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(wake_write_fd, False)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self, argv: list[str]) -> None:
        self._pid, self._output_fd = self._start(argv)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signal_group(number))
        exit_code = self._watch()
        self._signal_group(signal.SIGKILL)
        _end_descendants()
        with contextlib.suppress(BlockingIOError):
            while self._copy_output():
                pass
        self._tell(b"X", b"%d %d" % (exit_code, self._stop_asked))

    def _start(self, argv: list[str]) -> tuple[int, int]:
        output_fd, command_output_fd = os.pipe()
        failure_fd, command_failure_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(command_output_fd, 1)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
                os.execvp(argv[0], argv)  # noqa: S606 - no shell is the point
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
        os.close(command_output_fd)
        os.set_blocking(output_fd, False)
        return pid, output_fd

    def _watch(self) -> int:
        """Serve until the command has ended; its exit code."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(self._output_fd, select.POLLIN)
        poll.register(self._socket_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            if self._output_fd in ready and not self._copy_output():
                poll.unregister(self._output_fd)
            if self._wake_fd in ready:
                os.read(self._wake_fd, _CHUNK)
            exit_code = self._reap()
            if exit_code is not None:
                return exit_code
            if self._socket_fd in ready:
                poll.unregister(self._socket_fd)
                self._stop_asked = True
                self._signal_group(signal.SIGTERM)
                self._kill_at_s = time.monotonic() + self._grace_s
            if time.monotonic() >= self._kill_at_s:
                self._signal_group(signal.SIGKILL)
                self._kill_at_s = math.inf

    def _reap(self) -> int | None:
        """Take note of whoever ended; the command's exit code if it is among them."""
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == self._pid:
                return os.waitstatus_to_exitcode(status)
            if not ended:
                return None

    def _patience_ms(self) -> float | None:
        if math.isinf(self._kill_at_s):
            return None
        return max(self._kill_at_s - time.monotonic(), 0.0) * 1000 + 1

    def _signal_group(self, number: int) -> None:
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)
        except PermissionError:  # the command became another user; nothing more can be done from here
            self._log(b"stretto: no permission to signal the command\n")

    def _log(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end a training run
            os.write(self._log_fd, text)

    def _copy_output(self) -> bool:
        """Pass on one piece, as a command that never falls silent must be stoppable; False at the end."""
        chunk = os.read(self._output_fd, _CHUNK)
        self._log(chunk)
        for line in self._lines(chunk):
            if line.startswith(b"{"):
                self._tell(b"R", line)
        return bool(chunk)

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Whole lines; one that grows too long is given up (an empty line is left of it)."""
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            self._line += part
            if len(self._line) <= _LONGEST_REPORT:
                yield bytes(self._line).strip()
            self._line.clear()
        if len(self._line) <= _LONGEST_REPORT:
            self._line += rest

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


def main() -> None:
    socket_fd, grace_s, log, lock, *argv = sys.argv[1:]
    os.set_inheritable(int(socket_fd), False)
    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)  # held until this process ends
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(log_fd, b"stretto: waiting for an earlier process of this job to end\n")
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if select.select([int(socket_fd)], [], [], 0)[0]:
            return  # the controller has gone or changed its mind meanwhile
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    Guard(int(socket_fd), log_fd, float(grace_s)).run(argv)


if __name__ == "__main__":
    main()
