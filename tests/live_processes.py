"""Looking at the processes of this machine, and waiting for things."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STRETTO = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from stretto.cli.start import main; main()"
)
"""The command as a program of Python's, that hears Ctrl-C also where the tests run in the background."""


def running_with(text: str) -> list[str]:
    """Command lines of all live processes that mention `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(f"{entry.name} {line}")
    return found


def eventually(done: Callable[[], bool], within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while not done():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
