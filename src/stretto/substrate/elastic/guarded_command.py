"""A command under its guard, as its worker sees it: started, listened to, stopped."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.substrate.elastic.guard import START, TOKEN, end_leftovers, processes_of
from stretto.system.limits import SCARCE, limit_text
from stretto.system.private_files import file_mode, private_opener

_GUARD = Path(__file__).with_name("guard.py")
_PATIENCE_S = 5.0
"""How much longer than the grace a guard may take to end everything before it is killed itself."""
_TAIL_LINES = 10
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended."""

    code: int | None
    """Negative: the signal that ended it. None: not known, `error` says why."""
    asked: bool
    """It had been asked to stop before it ended."""
    error: str = ""
    rank: int | None = None
    """Which process of its job it was, if there were several."""
    started: bool = True
    """Whether it ran at all. If not, another try would fail in the same way."""
    scarce: int | None = None
    """The number of the error if a limit of the machine kept it from running."""

    @property
    def text(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        if self.code is None:
            return self.error
        if self.code >= 0:
            return f"exit code {self.code}{whose}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"killed by {name}" if self.rank is None else f"rank {self.rank} killed by {name}"


def cannot_start(why: object, number: int | None = None) -> CommandEnd:
    """`number` is that of the error, if it has one."""
    if number in SCARCE:
        text = f"it cannot be started: {limit_text(number)}"
        return CommandEnd(None, asked=False, error=text, started=False, scarce=number)
    return CommandEnd(None, asked=False, error=f"it cannot be started: {why}", started=False)


def end_of(log: Path) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(["its log ends:", *lines]) if lines else "nothing was written to its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFiles:
    """The job's log and reports, and the lock against a second start."""

    log: Path
    metrics: Path
    lock: Path


class GuardedCommand:
    """A command under its guard. Callbacks run in a thread of their own.

    A report has one of `keys`; the `metric` of a trial is the one that counts. With `tells_missed`,
    `on_missed` gets the lines that the metrics file has when the command starts. `on_flood` is called once if
    the command prints so fast that lines are left out.

    Raises OSError or ValueError if the guard cannot be started, for example if `cwd` is missing.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        files: CommandFiles,
        keys: Iterable[str],
        metric: str | None,
        tells_missed: bool,
        grace_s: float,
        on_line: Callable[[bytes], None],
        on_missed: Callable[[bytes], None],
        on_exit: Callable[[CommandEnd], None],
        on_flood: Callable[[], None],
    ) -> None:
        self._grace_s = grace_s
        self._token = env.get(TOKEN, "")
        self._on_line = on_line
        self._on_missed = on_missed
        self._on_exit = on_exit
        self._on_flood = on_flood
        self._asked = False
        self._overdue: threading.Timer | None = None
        self._socket, guard_end = socket.socketpair()
        options = {
            "grace_s": grace_s,
            "log": str(files.log),
            "lock": str(files.lock),
            "metrics": str(files.metrics),
            "keys": sorted(keys),
            "metric": metric,
            "token": self._token,
            "start": env.get(START, ""),
            "tells_missed": tells_missed,
            "mode": file_mode(),
        }
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(guard_end.fileno()), json.dumps(options)]
        try:
            with guard_end, open(files.log, "ab", opener=private_opener) as stderr:
                self._guard = subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
                    [*guard, *argv],
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(guard_end.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise
        self._listener = threading.Thread(target=self._listen, name=f"listen {argv[0]}", daemon=True)
        try:
            self._listener.start()
        except RuntimeError as error:  # there are too many threads
            self._guard.kill()
            self._guard.wait()
            self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def ask_to_stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace. Does not wait."""
        if not self._asked:
            self._ask(self._grace_s + _PATIENCE_S)

    def end_now(self) -> None:
        """SIGKILL. Does not wait."""
        self._guard.send_signal(signal.SIGUSR2)
        self._ask(_PATIENCE_S)

    def let_end(self) -> None:
        """Its work is done: it is asked to stop if it has not ended by itself within the grace."""
        self._guard.send_signal(signal.SIGUSR1)

    def _ask(self, patience_s: float) -> None:
        """Have the guard end it; a guard that takes too long is killed."""
        self._asked = True
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = threading.Timer(patience_s, self._guard.kill)  # the kernel then kills the command
        self._overdue.daemon = True
        self._overdue.start()

    def _listen(self) -> None:
        ended: CommandEnd | None = None
        unstarted: CommandEnd | None = None
        for what, text in self._said():
            if what == b"R":
                self._on_line(text)
            elif what == b"M":
                self._on_missed(text)
            elif what == b"F":
                self._on_flood()
            elif what == b"E":
                number, _, why = text.decode(errors="replace").partition(" ")
                unstarted = unstarted or cannot_start(why, int(number))
            elif what == b"X":
                code, asked = text.split()
                ended = CommandEnd(int(code), asked == b"1")
        guard_code = self._guard.wait()
        if self._overdue is not None:
            self._overdue.cancel()
        if ended is None and unstarted is None:
            self._end_leftovers()
            ended = CommandEnd(None, self._asked, f"its guard process ended unexpectedly (code {guard_code})")
        self._on_exit(unstarted or ended or cannot_start("for an unknown reason"))

    def _end_leftovers(self) -> None:
        """End what the command started, after the guard was killed (the command dies with the guard)."""
        if self._token:
            end_leftovers(lambda: processes_of(self._token), grace_s=self._grace_s)

    def _said(self) -> Iterator[tuple[bytes, bytes]]:
        """The messages of the guard, until it is gone."""
        with contextlib.suppress(ConnectionResetError), self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                yield line[:1], line[2:].rstrip(b"\n")
