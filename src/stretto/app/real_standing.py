"""Where a run stands that is not over: whether somebody drives it, and what its jobs do if nobody does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from stretto.app.real_board import Phase
from stretto.app.run_folder import RunFolder
from stretto.core.errors import InputError
from stretto.core.events import Event, RunPaused


class Standing(StrEnum):
    """Of a run that is not over."""

    GOING_ON = "unfinished"
    STOPPED = "stopped"
    """Cleanly; everything is saved."""
    INTERRUPTED = "interrupted"
    """Killed: nobody drives it any more, and nobody said so."""


def standing_of(folder: RunFolder, events: Sequence[Event]) -> Standing:
    """Where a run that is not over stands after these events."""
    if is_going_on(folder):
        return Standing.GOING_ON
    return Standing.STOPPED if events and isinstance(events[-1], RunPaused) else Standing.INTERRUPTED


def state_of(phase: Phase, standing: str) -> str:
    """Where a job stands in a run that ended by, or stands at, `standing`."""
    if phase not in {Phase.RUNNING, Phase.STARTING} or standing == Standing.GOING_ON:
        return str(phase)
    return str(standing) if standing == Standing.INTERRUPTED else "cut off"


def is_going_on(folder: RunFolder) -> bool:
    """Whether some process drives the run now: it holds the lock of the journal."""
    try:
        lock_fd = os.open(_lock_of(folder), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock_fd)
    return False


def check_free(folder: RunFolder) -> None:
    """Refuse to touch a run that some process drives, or measures for."""
    if is_going_on(folder):
        raise _in_use(folder)


@contextmanager
def not_begun_by_others(folder: RunFolder) -> Iterator[None]:
    """While this process measures for a run that is not begun, no other may measure for it or begin it."""
    lock = _lock_of(folder)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(
            f"cannot be written ({error.strerror}).",
            where=str(folder.path),
            remedy="Run where files may be written.",
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise _in_use(folder) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        with suppress(OSError):  # something is in it
            folder.path.rmdir()
        os.close(lock_fd)


def _in_use(folder: RunFolder) -> InputError:
    how_far = f"; `stretto report {folder.name}` tells how far it is" if folder.is_begun else ""
    return InputError(
        "another process is working on this run.",
        where=str(folder.path),
        remedy=f"Wait until it has ended, or stop it with Ctrl-C{how_far}. "
        "To begin another run, give it its own --name.",
    )


def _lock_of(folder: RunFolder) -> Path:
    """That of the journal, which tells that a run is going on."""
    return folder.journal.with_name(folder.journal.name + ".lock")
