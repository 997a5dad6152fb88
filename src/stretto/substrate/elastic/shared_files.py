"""Finds a file that two jobs have written, if their commands run in the same folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MOST_ENTRIES = 2000
"""The most entries of a folder that one look reads."""
_PASSED_OVER = frozenset({"runs", "venv", "node_modules", "site-packages"})
_SOURCES = (".py", ".ipynb", ".toml", ".yaml", ".yml", ".sh", ".md", ".cfg", ".ini")
"""Files that users edit while their jobs run."""
_SLACK_S = 0.05
"""File times are slightly behind the clock."""
_OUTPUTS = (1, 2)
_PROC = Path("/proc")
_SHARE, _FREE_S = 0.02, 0.1
"""Looking takes at most this share of the time, plus a little at the start."""

Scan = Callable[[Path], Iterator[tuple[str, float]]]
"""Yields the files under a folder, and when each was last written, in seconds since 1970."""


@dataclass(slots=True)
class _Written:
    """One file: when it was last written, and the jobs that ran at every change of it."""

    at_s: float
    by: frozenset[str]
    first: str
    """One of the jobs that ran at its first change."""


@dataclass(slots=True)
class SharedFolder:
    """Looks at a folder whenever a command there ends.

    A file that changed while some jobs ran was written by one of them. If no single job ran at all of its
    changes, two jobs may have written it. A file is ignored if it also changed while no job ran, or if a
    process outside this run has it open for writing.
    """

    folder: Path
    scan: Scan = field(default_factory=lambda: files_written)
    is_anothers: Callable[[Path], bool] = field(default_factory=lambda: written_elsewhere)
    now_s: Callable[[], float] = time.time
    stopwatch: Callable[[], float] = time.perf_counter
    _running: dict[str, float] = field(default_factory=dict)
    _left: list[tuple[str, float, float]] = field(default_factory=list)
    """Jobs that ended since the last look, with their times."""
    _files: dict[str, _Written] = field(default_factory=dict)
    _anothers: set[str] = field(default_factory=set)
    """Files that other programs write."""
    _known_from_s: float | None = None
    """From this time on we know which jobs ran when."""
    _begun_s: float | None = None
    _looked_s: float = 0.0
    _found: bool = False

    def started(self, job_id: str) -> None:
        now_s = self.now_s()
        self._running[job_id] = now_s
        self._known_from_s = now_s if self._known_from_s is None else self._known_from_s
        self._begun_s = self.stopwatch() if self._begun_s is None else self._begun_s

    def ended(self, job_id: str) -> tuple[str, str, str] | None:
        """A file and two jobs that may have written it, if there is one; returned once."""
        begun_s = self._running.pop(job_id, None)
        if begun_s is None or self._found:
            return None
        self._left.append((job_id, begun_s, self.now_s()))
        begun = self.stopwatch()
        if self._looked_s > _FREE_S + _SHARE * (begun - (self._begun_s or begun)):
            self._left.clear()  # we cannot tell who wrote what meanwhile
            self._files.clear()
            self._known_from_s = self.now_s()
            return None
        found = self._look(job_id)
        self._looked_s += self.stopwatch() - begun
        self._left.clear()
        self._found = found is not None
        return found

    def _look(self, job_id: str) -> tuple[str, str, str] | None:
        for name, at_s in self.scan(self.folder):
            before = self._files.get(name)
            if name in self._anothers or (before is not None and before.at_s == at_s):
                continue
            by = self._who_ran(at_s)
            if not by:
                self._files.pop(name, None)
                if self._known_from_s is not None and at_s > self._known_from_s:
                    self._anothers.add(name)
                continue
            if before is None:
                self._files[name] = _Written(at_s, by, job_id if job_id in by else min(by))
                continue
            common = before.by & by
            if not common and self.is_anothers(self.folder / name):
                self._anothers.add(name)
                continue
            if not common:
                return name, before.first, job_id if job_id in by else min(by)
            self._files[name] = _Written(
                at_s, common, before.first if before.first in common else min(common)
            )
        return None

    def _who_ran(self, at_s: float) -> frozenset[str]:
        ran = [job for job, begun_s in self._running.items() if begun_s - _SLACK_S <= at_s]
        ran += [job for job, begun_s, end_s in self._left if begun_s - _SLACK_S <= at_s <= end_s + _SLACK_S]
        return frozenset(ran)


def files_written(folder: Path) -> Iterator[tuple[str, float]]:
    """Files in a folder and its subfolders, without hidden files, source text and packages."""
    left = _MOST_ENTRIES
    waiting = [(folder, True)]
    while waiting and left > 0:
        where, goes_on = waiting.pop()
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    left -= 1
                    if left <= 0:
                        break
                    if entry.name.startswith((".", "__")) or entry.name.lower().endswith(_SOURCES):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if goes_on and entry.name not in _PASSED_OVER:
                            waiting.append((Path(entry.path), False))
                    elif entry.is_file(follow_symlinks=False):
                        yield os.path.relpath(entry.path, folder), entry.stat(follow_symlinks=False).st_mtime
        except OSError:
            continue  # it went meanwhile, or is not to be read


def written_elsewhere(path: Path, proc: Path = _PROC) -> bool:
    """Whether this process prints to a file, or a process that it did not start has it open for writing.

    Examples are the output of this run and of other runs in the folder, also through `tee`.
    """
    try:
        file = _identity(path.stat())
        if any(_identity(os.fstat(output)) == file for output in _OUTPUTS):
            return True
        pids = [int(one.name) for one in proc.iterdir() if one.name.isdigit()]
    except OSError:
        return False
    return any(_writes(proc / str(pid) / "fd", file) and not _is_ours(pid, proc) for pid in pids)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _writes(folder: Path, file: tuple[int, int]) -> bool:
    """Whether a process, given its folder of descriptors, has a file open for writing."""
    try:
        links = list(folder.iterdir())
    except OSError:  # it ended meanwhile, or is another user's
        return False
    for link in links:
        try:
            if link.lstat().st_mode & 0o200 and _identity(link.stat()) == file:
                return True
        except OSError:
            continue
    return False


def _is_ours(pid: int, proc: Path) -> bool:
    """Whether the process descends from this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def overwritten(found: tuple[str, str, str], folder: Path) -> str:
    """The note about such a file."""
    name, first, second = found
    return (
        f"{first} and {second} may both have written {name}: their commands run in one folder, {folder}, and "
        "the last one to write a file replaces it. Add --in-folder (in_folder = true), and each job runs in "
        "a folder of its own; or have the command write to {folder}."
    )
