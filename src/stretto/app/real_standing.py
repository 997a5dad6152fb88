"""Where a run stands that is not over: whether somebody drives it, and what its jobs do if nobody does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from enum import StrEnum

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
        lock_fd = os.open(folder.journal.with_name(folder.journal.name + ".lock"), os.O_RDONLY)
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
    """Refuse to touch a run that some process drives."""
    if is_going_on(folder):
        raise InputError(
            "another process is working on this run.",
            where=str(folder.path),
            remedy=f"Wait until it has ended, or stop it with Ctrl-C; `stretto report {folder.name}` tells "
            "how far it is. To begin another run, give it its own --name.",
        )
