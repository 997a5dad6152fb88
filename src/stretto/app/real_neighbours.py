"""Other runs that this machine is busy with now: whoever has the lock of a run open holds it."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.app.real_standing import who
from stretto.app.run_folder import RunFolder
from stretto.core.file_lock import Holder, holder_of, is_held
from stretto.core.units import counted

PROC = Path("/proc")
MOST_NAMED = 2
"""Of the runs on the same slots; the rest is counted."""
MOST_FOLDERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run that some process of this machine drives, or measures for."""

    folder: RunFolder
    holder: Holder


def live_runs(proc: Path = PROC) -> tuple[LiveRun, ...]:
    """Those of other processes that this user may see, wherever their folders are.

    There is no list of them that could be out of date: open files are looked at.
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
    except OSError:  # it ended meanwhile, or is another user's
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
    """What is said of other runs before one is put on these devices; nothing, if none is in its way.

    A GPU that two runs use is shared; cores are, if both together use more of them than there are.
    """
    now_s = time.time() if now_s is None else now_s
    found = [(run, shared) for run in runs if (shared := _shared(run.holder, devices, cores))]
    notes = [_note(run, shared, now_s) for run, shared in found[:MOST_NAMED]]
    if rest := [run for run, _ in found[MOST_NAMED:]]:
        notes.append(_more(rest))
    return tuple(notes)


def _more(runs: Sequence[LiveRun]) -> str:
    """How many more there are, and how to see them: a list of runs is of one folder."""
    folders = sorted({str(run.folder.path.parent) for run in runs})
    lists = ", ".join(f"`stretto runs {shlex.quote(folder)}`" for folder in folders[:MOST_FOLDERS])
    others = len(folders) - MOST_FOLDERS
    rest = f" and {counted(others, 'other folder')}" if others > 0 else ""
    return f"And {counted(len(runs), 'more run')} on the same slots, listed by {lists}{rest}."


def _shared(holder: Holder, devices: Sequence[str], cores: int) -> str:
    """The devices of both, in words; nothing if there are none."""
    gpus = sorted((Counter(filter(None, holder.devices)) & Counter(filter(None, devices))).keys())
    if gpus:
        return f"GPU {', '.join(gpus)}"
    if any(devices) or any(holder.devices) or not holder.devices:
        return ""
    both = len(holder.devices) + len(devices)
    return f"{counted(cores, 'core')}, with {both} slots together" if both > cores else ""


def _note(run: LiveRun, shared: str, now_s: float) -> str:
    return (
        f"Another run trains on the same slots ({shared}): {run.folder.path}, {who(run.holder, now_s)}. "
        "Both are slower for it. Wait for it, stop it with "
        f"`stretto stop {run.folder.path}`, or give each its share with --slots or CUDA_VISIBLE_DEVICES."
    )
