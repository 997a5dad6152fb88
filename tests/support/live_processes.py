"""Looking at the processes of this machine, and waiting for things."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SUPPORT = Path(__file__).parent
"""Where the helpers of the tests are, for processes that import them."""
STRETTO = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from stretto.cli.start import main; main()"
)
"""The command as a program of Python's, that hears Ctrl-C also where the tests run in the background."""


def running_with(text: str) -> list[str]:
    """Command lines of all live processes but this one that mention `text`, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found.append((_began_ticks(entry), f"{entry.name} {line}"))
    return [line for _, line in sorted(found)]


def pids_with(text: str) -> list[int]:
    """Oldest first: numbers begin anew at the system's highest, so they do not tell."""
    return [int(line.split()[0]) for line in running_with(text)]


def _began_ticks(process: Path) -> int:
    after_name = (process / "stat").read_text().rpartition(")")[2].split()
    return int(after_name[19])


def eventually(done: Callable[[], bool], within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while not done():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
