"""Whether a process works on a run, how the run ended, and which other runs use this machine."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.events import Event, RunPaused
from stretto.core.units import counted, format_duration
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RunFolder, unreadable
from stretto.runs.live_state import JobPhase
from stretto.system.locks import FileLock, Holder, LockedError, holder_of, is_held
from stretto.system.private_files import close_to_others, make_private_folder

TRIES = 10
"""Attempts to make a folder that another process may remove meanwhile."""


class RunStatus(StrEnum):
    """The status of a run that is not over."""

    UNFINISHED = "unfinished"
    STOPPED = "stopped"
    """Stopped cleanly, with everything saved."""
    INTERRUPTED = "interrupted"
    """Killed: no process works on it, and its journal does not say that it stopped."""


def status_of(folder: RunFolder, last: Event | None) -> RunStatus:
    """The status of a run that is not over; `last` is its last event."""
    if is_going_on(folder):
        return RunStatus.UNFINISHED
    return RunStatus.STOPPED if isinstance(last, RunPaused) else RunStatus.INTERRUPTED


def shown_state(phase: JobPhase, status: str) -> str:
    """The phase of a job as users see it, given the status or the end of its run."""
    if phase not in {JobPhase.RUNNING, JobPhase.STARTING} or status == RunStatus.UNFINISHED:
        return str(phase)
    return str(status) if status == RunStatus.INTERRUPTED else "cut off"


def read_ending(folder: RunFolder) -> EndedBy | None:
    """How the run ended; None if it is not over."""
    result = folder.read("result")
    try:
        return None if result is None else EndedBy(result["ended_by"])
    except (KeyError, ValueError) as error:
        raise unreadable(folder.path / "result.json") from error


def ending_of(folder: RunFolder) -> EndedBy | None:
    """How the run ended, also by a deadline that passed while it was down; None if it is not over."""
    ended_by, spec = read_ending(folder), folder.begun_spec()
    if ended_by is not None or spec.deadline_s is None or is_going_on(folder):
        return ended_by
    return EndedBy.DEADLINE if time.time() - spec.started_at_s >= spec.deadline_s else None


def is_going_on(folder: RunFolder) -> bool:
    """Whether a process works on the run now: that process holds the run's lock."""
    return is_held(folder.lock)


def check_free(folder: RunFolder) -> None:
    """Refuse to touch a run that another process works on."""
    if is_going_on(folder):
        raise _in_use(folder)


@dataclass(slots=True)
class _Hold:
    lock: FileLock
    made: list[Path]
    """The folders that were made for it."""
    times: int = 0


class _Holds(threading.local):
    """The run folders that this thread holds."""

    def __init__(self) -> None:
        self.by_path: dict[Path, _Hold] = {}


_holds = _Holds()


@contextmanager
def holding(folder: RunFolder, devices: tuple[str, ...] = ()) -> Iterator[FileLock]:
    """Hold the run during the block: others cannot begin, resume or remove it.

    A run is held before anything is written in its folder, and a thread may hold it several times. The folder
    is removed at the end if it is still empty. `devices` tells other runs which devices this one trains on.
    """
    place = folder.lock.absolute()
    hold = _holds.by_path.get(place)
    if hold is None:
        hold = _holds.by_path[place] = _taken(folder)
    if devices and devices != hold.lock.holder.devices:
        hold.lock.say(replace(hold.lock.holder, devices=devices))
    hold.times += 1
    try:
        yield hold.lock
    finally:
        hold.times -= 1
        if not hold.times:
            del _holds.by_path[place]
            _release(folder, hold)


def _taken(folder: RunFolder) -> _Hold:
    for tries_left in reversed(range(TRIES)):
        try:
            made = make_private_folder(folder.path)
            lock = FileLock(folder.lock)
        except LockedError:
            raise _in_use(folder) from None
        except FileNotFoundError as error:  # the process that held it has just removed the empty folder
            if not tries_left:
                raise _unwritable(folder, error) from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        else:
            break
    close_to_others(folder.path)
    with suppress(OSError):
        folder.stop_asked.unlink(missing_ok=True)
    return _Hold(lock, made)


def _unwritable(folder: RunFolder, error: OSError) -> InputError:
    return InputError(
        f"cannot be written ({error.strerror}).",
        where=str(folder.path),
        remedy="Run where files may be written.",
    )


def _release(folder: RunFolder, hold: _Hold) -> None:
    """Release the lock, then remove the folder if it is empty."""
    in_place, begun = hold.lock.is_in_place, folder.is_begun
    hold.lock.release(remove=not begun)
    if in_place and not begun:
        with suppress(OSError):  # something is in it
            for path in {folder.path: None, **dict.fromkeys(reversed(hold.made))}:
                path.rmdir()


def holder_text(holder: Holder | None, now_s: float) -> str:
    """The process that holds a lock, in words."""
    if holder is None:
        return "another process"
    since = time.strftime("%H:%M:%S", time.localtime(holder.since_s))
    return (
        f"process {holder.pid} on {holder.host} (`{holder.command}`, "
        f"for {format_duration(max(now_s - holder.since_s, 0.0))}, since {since})"
    )


def _in_use(folder: RunFolder) -> InputError:
    how_far = f"; `stretto report {folder.name}` says how far it is" if folder.is_begun else ""
    return InputError(
        f"another process is working on this run: {holder_text(holder_of(folder.lock), time.time())}.",
        where=str(folder.path),
        remedy=f"Wait until it has ended, or stop it with `stretto stop {folder.name}`{how_far}. "
        "To begin another run, give it its own --name.",
    )


PROC = Path("/proc")
MOST_NAMED = 2
"""The most runs on the same slots that are named."""
MOST_FOLDERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run that a process of this machine works on."""

    folder: RunFolder
    holder: Holder


def live_runs(proc: Path = PROC) -> tuple[LiveRun, ...]:
    """The runs of other processes that this user may see, in any folder.

    They are found by their open lock files, so that no list can be out of date.
    """
    found: dict[Path, LiveRun] = {}
    for pid in sorted(int(one.name) for one in proc.iterdir() if one.name.isdigit()):
        if pid == os.getpid():
            continue
        for path in _locks_of(proc / str(pid) / "fd"):
            holder = holder_of(path)
            if path not in found and holder is not None and holder.pid == pid and is_held(path):
                found[path] = LiveRun(folder=RunFolder(path.parent), holder=holder)
    return tuple(found.values())


def _locks_of(folder: Path) -> Iterator[Path]:
    """The run locks that a process has open."""
    name = RunFolder(Path()).lock.name
    try:
        links = list(folder.iterdir())
    except OSError:  # the process ended, or belongs to another user
        return
    for link in links:
        try:
            place = str(link.readlink())
        except OSError:
            continue
        if place.endswith(f"/{name}"):
            yield Path(place)


def neighbour_notes(
    runs: Iterable[LiveRun], devices: Sequence[str], *, cores: int, now_s: float | None = None
) -> tuple[str, ...]:
    """Notes about other runs that share these devices.

    Two runs share a GPU if both use it; they share cores if both have more slots than there are cores.
    """
    now_s = time.time() if now_s is None else now_s
    found = [(run, shared) for run in runs if (shared := _shared(run.holder, devices, cores))]
    notes = [_note(run, shared, now_s) for run, shared in found[:MOST_NAMED]]
    if rest := [run for run, _ in found[MOST_NAMED:]]:
        notes.append(_more(rest))
    return tuple(notes)


def _more(runs: Sequence[LiveRun]) -> str:
    """How many more runs there are, and the commands that list them."""
    folders = sorted({str(run.folder.path.parent) for run in runs})
    lists = ", ".join(f"`stretto runs {shlex.quote(folder)}`" for folder in folders[:MOST_FOLDERS])
    others = len(folders) - MOST_FOLDERS
    rest = f" and {counted(others, 'other folder')}" if others > 0 else ""
    return f"And {counted(len(runs), 'more run')} on the same slots, listed by {lists}{rest}."


def _shared(holder: Holder, devices: Sequence[str], cores: int) -> str:
    """What both runs use, in words; empty if nothing."""
    gpus = sorted((Counter(filter(None, holder.devices)) & Counter(filter(None, devices))).keys())
    if gpus:
        return f"GPU {', '.join(gpus)}"
    if any(devices) or any(holder.devices) or not holder.devices:
        return ""
    both = len(holder.devices) + len(devices)
    return f"{counted(cores, 'core')}, with {both} slots together" if both > cores else ""


def _note(run: LiveRun, shared: str, now_s: float) -> str:
    return (
        f"Another run trains on the same slots ({shared}): {run.folder.path}, "
        f"{holder_text(run.holder, now_s)}. "
        "Both are slower for it. Wait for it, stop it with "
        f"`stretto stop {run.folder.path}`, or give each its share with --slots or CUDA_VISIBLE_DEVICES."
    )
