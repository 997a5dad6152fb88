"""The logs of a run's jobs, also while they grow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from stretto.core.errors import InputError, did_you_mean
from stretto.core.units import several
from stretto.inputs.fields import is_folder_name
from stretto.runs.folder import RunFolder
from stretto.runs.manage import jobs_of
from stretto.runs.status import is_going_on

CHUNK_BYTES = 1 << 16
LOOK_S = 0.2
LAST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LogInfo:
    """One log, as listed."""

    job: str
    """Its job; empty for a log of the run itself."""
    path: Path
    size_bytes: int
    changed_s: float | None
    """Wall clock time; None if nothing was printed yet."""
    last_line: str


def list_logs(folder: RunFolder) -> tuple[LogInfo, ...]:
    """The logs of all jobs, then those of the run: failed trials of the training code, failed launches."""
    own = [folder.failed_log, *sorted(folder.nodes.glob("*.log"))]
    jobs = [_line(job, folder.log(job)) for job in jobs_of(folder)]
    return (*jobs, *(_line("", path) for path in own if path.is_file()))


def log_of(folder: RunFolder, job: str) -> Path:
    """The path of a job's log, which may not exist yet; InputError if there is no such job."""
    jobs = jobs_of(folder)
    if not is_folder_name(job) or job not in jobs:
        there = f"It has {several(jobs)}." if jobs else "It has none yet."
        raise InputError(
            f"there is no job {job!r}.", where=str(folder.path), remedy=f"{did_you_mean(job, jobs)}{there}"
        )
    return folder.log(job)


def pieces_of(path: Path) -> Iterator[bytes]:
    """The content of a log, in pieces."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


@dataclass(slots=True)
class FollowedLog:
    """Reads what is added to a log. A log that was replaced is read from its beginning.

    A log that grew too long is renamed `<path>.1`; its rest is read first.
    """

    path: Path
    _inode: int = 0
    _at: int = 0

    def more(self) -> bytes:
        """The next piece that was added; empty if there is none."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode:
                    if piece := self._more_put_aside():
                        return piece
                    self._inode, self._at = status.st_ino, 0
                elif status.st_size < self._at:
                    self._at = 0
                return self._read(file)
        except OSError:  # it does not exist yet, or its folder was removed
            return b""

    def _more_put_aside(self) -> bytes:
        try:
            with self.path.with_name(f"{self.path.name}.1").open("rb") as file:
                return self._read(file) if os.fstat(file.fileno()).st_ino == self._inode else b""
        except OSError:
            return b""

    def _read(self, file: BinaryIO) -> bytes:
        file.seek(self._at)
        piece = file.read(CHUNK_BYTES)
        self._at += len(piece)
        return piece


@dataclass(slots=True)
class PrefixedLines:
    """Joins pieces of a log to whole lines and puts the job before each. A very long line is split."""

    prefix: bytes
    _rest: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes, *, last: bool = False) -> bytes:
        self._rest += piece
        whole, newline, rest = bytes(self._rest).rpartition(b"\n")
        if rest and (last or len(rest) > CHUNK_BYTES):
            whole, newline, rest = whole + newline + rest, b"\n", b""
        if not newline:
            return b""
        self._rest = bytearray(rest)
        return b"".join(self.prefix + line + b"\n" for line in whole.split(b"\n"))


def follow(
    folder: RunFolder,
    job: str | None,
    write: Callable[[bytes], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    is_over: Callable[[RunFolder], bool] = lambda folder: not is_going_on(folder),
) -> None:
    """Write a log until the run ends; without a job, all logs with the job before each line."""
    logs: dict[str, FollowedLog] = {}
    lines: dict[str, PrefixedLines] = {}
    while True:
        over = is_over(folder)
        for name in [job] if job is not None else _with_folders(folder):
            logs.setdefault(name, FollowedLog(folder.log(name)))
            lines.setdefault(name, PrefixedLines(f"{name} | ".encode()))
        while pieces := {name: piece for name, log in logs.items() if (piece := log.more())}:
            for name, piece in pieces.items():
                write(piece if job is not None else lines[name].add(piece))
        if over:
            break
        sleep(LOOK_S)
    if job is None:
        for one in lines.values():
            write(one.add(b"", last=True))


def _with_folders(folder: RunFolder) -> Sequence[str]:
    try:
        return sorted(path.name for path in (folder.path / "jobs").iterdir() if path.is_dir())
    except OSError:
        return []


def _line(job: str, path: Path) -> LogInfo:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(status.st_size - LAST_BYTES, 0))
            end = file.read().decode(errors="replace").strip()
    except OSError:
        return LogInfo(job=job, path=path, size_bytes=0, changed_s=None, last_line="")
    last = end.splitlines()[-1] if end else ""
    return LogInfo(job=job, path=path, size_bytes=status.st_size, changed_s=status.st_mtime, last_line=last)
