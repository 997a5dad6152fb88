"""Limits of the machine that make a start fail: how to recognise and explain them, and when to retry."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Errors that may go away when another process ends."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
PATIENCE_S = 600.0
"""How long a start is retried before it counts as failed."""
_PIDS_MAX = Path("/sys/fs/cgroup/pids.max")


def scarce_number(error: BaseException) -> int | None:
    """The errno of an error that means a limit is reached; None for other errors."""
    if isinstance(error, OSError) and error.errno in SCARCE:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return errno.EAGAIN
    return None


def scarce_in(text: str) -> int | None:
    """The same, from a library's error message."""
    return next((number for number in sorted(SCARCE) if os.strerror(number) in text), None)


def limit_text(number: int) -> str:
    """A sentence that names the limit behind an errno, and what to do."""
    if number == errno.EMFILE:
        most = _shown(resource.RLIMIT_NOFILE)
        return f"the limit of open files of a process (ulimit -n: {most}) is reached; raise it, or run fewer"
    if number == errno.ENFILE:
        return "the machine's limit of open files (fs.file-max) is reached; raise it, or run fewer"
    if number == errno.EAGAIN:
        most = _shown(resource.RLIMIT_NPROC)
        return (
            f"the limit of processes and threads (ulimit -u: {most}{_pids()}) is reached; "
            "raise it, or run fewer"
        )
    return "the machine has no memory left for another process; run fewer, or smaller ones"


@dataclass(frozen=True, slots=True)
class Retry:
    """When to retry a start that failed because of a limit."""

    first_s: float
    """The time of the first attempt."""
    again_s: float
    """The time of the next attempt."""
    wait_s: float

    @classmethod
    def at(cls, now_s: float, last: Retry | None) -> Retry | None:
        """The retry after a failed attempt; None if PATIENCE_S is over."""
        if last is None:
            return cls(now_s, now_s + FIRST_WAIT_S, FIRST_WAIT_S)
        if now_s - last.first_s >= PATIENCE_S:
            return None
        wait_s = min(2 * last.wait_s, LONGEST_WAIT_S)
        return cls(last.first_s, now_s + wait_s, wait_s)


def _shown(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _pids() -> str:
    """The container's limit of processes, which is often lower."""
    try:
        most = _PIDS_MAX.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if most == "max" else f", pids.max: {most}"
