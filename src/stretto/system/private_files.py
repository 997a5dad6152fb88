"""Files and folders that only their owner can read, whatever the umask.

We never change the umask, because it also applies to the user's training code. Instead we set the mode of
each file and folder. `STRETTO_GROUP_READABLE=1` lets the members of the group read them, except locks: anyone
who can open a file can lock it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

GROUP_READABLE = "STRETTO_GROUP_READABLE"
LOCK_MODE = 0o600
_NO = frozenset({"", "0", "false", "no"})


def is_group_readable() -> bool:
    """Whether the group may read our files."""
    return os.environ.get(GROUP_READABLE, "").strip().lower() not in _NO


def file_mode() -> int:
    return 0o640 if is_group_readable() else 0o600


def folder_mode() -> int:
    return 0o750 if is_group_readable() else 0o700


def private_opener(path: str, flags: int) -> int:
    """For `open(path, mode, opener=private_opener)`."""
    return open_private(path, flags)


def open_private(path: str | Path, flags: int, *, mode: int | None = None) -> int:
    """Open a file that others cannot read; the mode of an existing file is corrected."""
    wanted = file_mode() if mode is None else mode
    fd = os.open(path, flags | os.O_CLOEXEC, wanted)
    _set_mode(fd, wanted)
    return fd


def make_private_folder(path: Path) -> list[Path]:
    """Make a folder and its missing parents, all private; returns those that were made."""
    made: list[Path] = []
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=folder_mode())
        except FileExistsError as error:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
        else:
            folder.chmod(folder_mode())
            made.append(folder)
    return made


def close_to_others(folder: Path) -> None:
    """Make an existing folder private, such as one of an older version; ignored if we are not the owner."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _set_mode(fd, folder_mode())
        finally:
            os.close(fd)


def write_private(path: Path, content: bytes, *, on_written: Callable[[int], None] = os.fsync) -> None:
    """Write a small file atomically; it is on the disk when this returns."""
    unfinished = path.with_name(path.name + ".new")
    fd = open_private(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        on_written(file.fileno())
    unfinished.replace(path)


def _set_mode(fd: int, wanted: int) -> None:
    found = os.fstat(fd).st_mode
    if stat.S_IMODE(found) & 0o777 == wanted or not (stat.S_ISREG(found) or stat.S_ISDIR(found)):
        return
    with contextlib.suppress(PermissionError):  # another user's file
        os.fchmod(fd, wanted | stat.S_IMODE(found) & stat.S_ISGID)
