"""The processes of one job as the controller sees them: started, listened to, stopped."""

from __future__ import annotations

import contextlib
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

from stretto.core.private_files import file_mode, private_opener

_GUARD = Path(__file__).with_name("process_guard.py")
_PATIENCE_S = 5.0
"""How much longer than the grace a guard may take to end everything before it is killed itself."""
_TAIL_LINES = 10
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Exit:
    """How a job's processes ended: the first that failed, or all well."""

    code: int | None
    """Negative: the signal that ended it. None: not known, `error` says why."""
    asked: bool
    """It had been asked to stop before it ended."""
    error: str = ""
    rank: int | None = None
    """Which process it was, where there were several."""
    started: bool = True
    """Whether it ran at all; another try would go the same way if not."""

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


def cannot_start(why: object) -> Exit:
    return Exit(None, asked=False, error=f"it cannot be started: {why}", started=False)


def end_of(log: Path) -> str:
    """How a log ends; where it is must be said besides."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(["its log ends:", *lines]) if lines else "nothing was written to its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where a job's output, its reports, and the lock against a second start are."""

    log: Path
    metrics: Path
    lock: Path


class GuardedCommand:
    """A command under its guard. What is called back is called from a thread of its own.

    `ranks` has the environment of each process beyond `env`; a report has one of `keys`. With
    `tells_missed`, `on_missed` is given what the metrics file has already when the command is started.

    Raises OSError or ValueError if not even the guard can be started, as where `cwd` is missing.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        ranks: Sequence[Mapping[str, str]],
        cwd: Path | None,
        files: Files,
        keys: Iterable[str],
        tells_missed: bool,
        grace_s: float,
        on_line: Callable[[bytes], None],
        on_missed: Callable[[bytes], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._grace_s = grace_s
        self._on_line = on_line
        self._on_missed = on_missed
        self._on_exit = on_exit
        self._asked = False
        self._overdue: threading.Timer | None = None
        self._several = len(ranks) > 1
        self._socket, guard_end = socket.socketpair()
        options = {
            "grace_s": grace_s,
            "log": str(files.log),
            "lock": str(files.lock),
            "metrics": str(files.metrics),
            "ranks": [dict(one) for one in ranks],
            "keys": sorted(keys),
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
        self._listener.start()

    def ask_to_stop(self) -> None:
        """SIGTERM to all of it, SIGKILL after the grace; does not wait."""
        self._ask(self._grace_s + _PATIENCE_S)

    def end_now(self) -> None:
        """SIGKILL to all of it; does not wait."""
        self._guard.send_signal(signal.SIGUSR2)
        self._ask(_PATIENCE_S)

    def let_end(self) -> None:
        """What it does is done: if it has not ended by itself within the grace, it is asked to stop."""
        self._guard.send_signal(signal.SIGUSR1)

    def wait(self) -> None:
        """Until nothing of it is left, once it was asked to stop."""
        self._listener.join()

    def _ask(self, patience_s: float) -> None:
        """Have it ended; a guard that does not manage that in time is killed itself."""
        self._asked = True
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._socket.shutdown(socket.SHUT_WR)
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = threading.Timer(patience_s, self._guard.kill)  # the kernel then kills the command
        self._overdue.daemon = True
        self._overdue.start()

    def _listen(self) -> None:
        ended: Exit | None = None
        error = ""
        for what, text in self._said():
            if what == b"R":
                self._on_line(text)
            elif what == b"M":
                self._on_missed(text)
            elif what == b"E":
                error = text.decode(errors="replace")
            elif what == b"X":
                code, asked, rank = text.split()
                ended = Exit(int(code), asked == b"1", rank=int(rank) if self._several else None)
        guard_code = self._guard.wait()
        if self._overdue is not None:
            self._overdue.cancel()
        if error:
            ended = cannot_start(error)
        elif ended is None:
            ended = Exit(None, self._asked, f"its guard process ended unexpectedly (code {guard_code})")
        self._on_exit(ended)

    def _said(self) -> Iterator[tuple[bytes, bytes]]:
        """What the guard says until it is gone."""
        with contextlib.suppress(ConnectionResetError), self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                yield line[:1], line[2:].rstrip(b"\n")
