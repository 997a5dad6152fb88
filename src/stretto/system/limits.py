"""Limits of the machine that keep something from being started: what is said, and when it is tried again."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Errors that may be over when something else has ended."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
PATIENCE_S = 600.0
"""How long a start is tried again before it counts as failed."""
_PIDS_MAX = Path("/sys/fs/cgroup/pids.max")


def scarce_number(error: BaseException) -> int | None:
    """Of an error that says that a limit is reached, which one; None of any other."""
    if isinstance(error, OSError) and error.errno in SCARCE:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return errno.EAGAIN
    return None


def scarce_in(text: str) -> int | None:
    """Likewise, of what was said about an error that a library met."""
    return next((number for number in sorted(SCARCE) if os.strerror(number) in text), None)


def limit_text(number: int) -> str:
    """Which limit an error means, and what to do about it."""
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
    """When a start that a limit kept from being is tried again."""

    first_s: float
    """When it was tried first."""
    again_s: float
    wait_s: float

    @classmethod
    def at(cls, now_s: float, last: Retry | None) -> Retry | None:
        """After another attempt that came to nothing; None if there were enough."""
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
    """What the container allows, which is often less."""
    try:
        most = _PIDS_MAX.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if most == "max" else f", pids.max: {most}"
