"""Asking the process that works on a run to stop, and saying what it has saved."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.app.real_board import Board, Phase
from stretto.app.real_result import kept_checkpoint
from stretto.app.real_standing import is_going_on
from stretto.app.real_stop import unsaved_jobs
from stretto.app.run_folder import RunFolder
from stretto.core.errors import InputError, JournalError
from stretto.core.file_lock import Holder, holder_of
from stretto.core.plain_json import UnreadableError, read_json
from stretto.core.private_files import write_private
from stretto.core.units import several

SECOND_S = 0.5
"""Between two requests: signals that come at once are one."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the jobs of a run that stands still have saved."""

    saved: tuple[str, ...]
    """Jobs that go on from a checkpoint, with the epoch they came to."""
    unsaved: tuple[str, ...]
    """Jobs that were asked to save, and did not."""
    own: tuple[str, ...]
    """Jobs whose command keeps what it likes."""


def ask_to_stop(folder: RunFolder, *, at_once: bool) -> Holder | None:
    """Send the process of a running run what Ctrl-C sends, or twice that; says which process it is.

    None if the run has ended meanwhile. A second request without `at_once` is not sent: the run is stopping
    already.
    """
    holder = _controller(folder)
    if holder is None:
        return None
    asked = _was_asked(folder, holder)
    if not asked:
        with suppress(OSError):  # a full disk keeps no one from stopping
            write_private(folder.stop_asked, _token(holder))
        try:
            os.kill(holder.pid, signal.SIGTERM)
        except ProcessLookupError:
            with suppress(OSError):
                folder.stop_asked.unlink(missing_ok=True)
            return None
    if at_once:
        if not asked:
            time.sleep(SECOND_S)
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGTERM)
    return holder


def wait_until_stopped(folder: RunFolder, sleep: Callable[[float], None] = time.sleep) -> None:
    """Until nobody works on the run any more."""
    while is_going_on(folder):
        sleep(LOOK_S)
    with suppress(OSError):
        folder.stop_asked.unlink(missing_ok=True)


def saved_by(folder: RunFolder) -> Saved:
    """What a run that was stopped goes on from."""
    events = list(folder.events())
    board = Board()
    for event in events:
        board.observe(event)
    unsaved = unsaved_jobs(events)
    saved: list[str] = []
    own: list[str] = []
    for line in board.jobs.values():
        if line.phase is not Phase.PAUSED or line.job.id in unsaved:
            continue
        if kept_checkpoint(folder, line) is None:
            own.append(line.job.id)
        else:
            saved.append(f"{line.job.id} (epoch {line.epoch})")
    return Saved(saved=tuple(saved), unsaved=tuple(unsaved), own=tuple(own))


def _controller(folder: RunFolder) -> Holder | None:
    """The process that works on a run, None if none does any more.

    InputError if it cannot be told, or cannot be reached from here.
    """
    where, host = str(folder.path), socket.gethostname()
    holder = holder_of(folder.lock)
    if holder is not None and holder.host != host:
        raise InputError(
            f"process {holder.pid} on {holder.host} works on it, and this is {host}.",
            where=where,
            remedy=f"Run `stretto stop` on {holder.host}.",
        )
    pids = _with_open(folder.lock)
    if holder is not None and holder.pid in pids:
        return holder
    if holder is None and len(pids) == 1:  # of version 0.1, which does not write down who it is
        return Holder(pid=pids[0], since_s=0.0, command="", host=host)
    if not is_going_on(folder):
        return None
    raise InputError(
        "a process works on it that cannot be seen from here: another user's, or in another container.",
        where=where,
        remedy="Stop it where it was started.",
    )


def _with_open(path: Path) -> list[int]:
    """The processes that have a file open, as far as this user may know."""
    try:
        wanted = path.stat()
    except OSError:
        return []
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                links = list((process / "fd").iterdir())
            except OSError:
                continue
            for link in links:
                with suppress(OSError):
                    if os.path.samestat(wanted, link.stat()):
                        found.append(int(process.name))
                        break
    return sorted(found)


def _token(holder: Holder) -> bytes:
    return f'{{"pid": {holder.pid}, "since_s": {holder.since_s!r}}}\n'.encode()


def _was_asked(folder: RunFolder, holder: Holder) -> bool:
    try:
        found = read_json(folder.stop_asked)
    except (OSError, UnreadableError):
        return False
    return bool(found == {"pid": holder.pid, "since_s": holder.since_s})


def what_was_saved(folder: RunFolder) -> str:
    """In words; empty where nothing ran."""
    try:
        found = saved_by(folder)
    except (JournalError, KeyError, TypeError, ValueError) as error:
        return f"what it saved cannot be told: {error}"
    parts = []
    if found.saved:
        parts.append(f"saved: {several(found.saved)}")
    if found.unsaved:
        parts.append(f"did not save: {several(found.unsaved)}")
    if found.own:
        parts.append(f"without a checkpoint of ours, so as their commands saved: {several(found.own)}")
    return "; ".join(parts)
