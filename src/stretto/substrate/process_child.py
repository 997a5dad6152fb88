"""One command as the controller sees it: started, listened to, stopped."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_GUARD = Path(__file__).with_name("process_guard.py")
_PATIENCE_S = 5.0
"""How much longer than the grace a guard may take to end everything before it is killed itself."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended."""

    code: int | None
    """Negative: the signal that ended it. None: not known, `error` says why."""
    asked: bool
    """It had been asked to stop before it ended."""
    error: str = ""

    @property
    def text(self) -> str:
        if self.code is None:
            return self.error
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class GuardedCommand:
    """A command under its guard. `on_line` and `on_exit` are called from a thread of its own.

    Raises OSError or ValueError if not even the guard can be started, as where `cwd` is missing.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        log: Path,
        grace_s: float,
        on_line: Callable[[bytes], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._grace_s = grace_s
        self._on_line = on_line
        self._on_exit = on_exit
        self._asked = False
        self._socket, guard_end = socket.socketpair()
        guard_fd = str(guard_end.fileno())
        lock = log.with_name("lock")
        guard = [sys.executable, "-I", "-S", str(_GUARD), guard_fd, str(grace_s), str(log), str(lock)]
        try:
            with guard_end, log.open("ab") as stderr:
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
        self._asked = True
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self) -> None:
        """Until nothing of it is left, once it was asked to stop."""
        self._listener.join(self._grace_s + _PATIENCE_S)
        if self._listener.is_alive():
            self._guard.kill()  # the kernel then kills the command
            self._listener.join()

    def _listen(self) -> None:
        ended: Exit | None = None
        error = ""
        with self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                what, text = line[:1], line[2:].rstrip(b"\n")
                if what == b"R":
                    self._on_line(text)
                elif what == b"E":
                    error = text.decode(errors="replace")
                elif what == b"X":
                    code, asked = text.split()
                    ended = Exit(int(code), asked == b"1")
        guard_code = self._guard.wait()
        if error:
            ended = Exit(None, asked=False, error=f"it cannot be started: {error}")
        elif ended is None:
            ended = Exit(None, self._asked, f"its guard process ended unexpectedly (code {guard_code})")
        self._on_exit(ended)
