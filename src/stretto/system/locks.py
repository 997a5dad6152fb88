"""A lock between processes, released however its holder ends.

It locks an open file (flock), so it is never stale. The file's content describes the holder, for people.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from stretto.system.plain_json import UnreadableError, read_json
from stretto.system.private_files import LOCK_MODE, open_private

_TRIES = 6
_RETRY_S = 0.02
_LONGEST_COMMAND = 500
_MOST_BYTES = 1 << 16


class LockedError(Exception):
    """Another process, or another part of this one, holds the lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is held")
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lock, as it described itself."""

    pid: int
    since_s: float
    """Unix time."""
    command: str
    host: str
    devices: tuple[str, ...] = ()
    """One for every slot it trains on: a GPU's name, or empty for a CPU core."""


def myself() -> Holder:
    """This process."""
    program, *words = sys.argv or [""]
    command = shlex.join([Path(program).name or "python", *words])
    if len(command) > _LONGEST_COMMAND:
        command = command[:_LONGEST_COMMAND] + " .."
    return Holder(pid=os.getpid(), since_s=time.time(), command=command, host=socket.gethostname())


class FileLock:
    """Held by this process from now until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock. LockedError if another process holds it, OSError if the file cannot be made."""
        self.path = path
        self.fd = _taken(path)
        self.holder = myself()
        self.say(self.holder)

    def say(self, holder: Holder) -> None:
        """Write the holder into the file. A full disk is ignored: the lock holds anyway."""
        self.holder = holder
        content = json.dumps(asdict(holder)).encode()
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, content, 0)

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to the locked file; its folder may have been moved or deleted."""
        return self.fd >= 0 and _is_at(self.path, self.fd)

    def release(self, *, remove: bool = False) -> None:
        if self.fd < 0:
            return
        if remove and self.is_in_place:
            with suppress(OSError):
                self.path.unlink()
        os.close(self.fd)
        self.fd = -1


def is_held(path: Path) -> bool:
    """Whether a process holds the lock. If we may not open the file, we ask /proc/locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return _kernel_has_lock_on(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def holder_of(path: Path) -> Holder | None:
    """The current or last holder of a lock; None if the file does not say."""
    try:
        return msgspec.convert(read_json(path, most_bytes=_MOST_BYTES), Holder)
    except (OSError, UnreadableError, msgspec.ValidationError):
        return None


def _taken(path: Path) -> int:
    """The locked file. We try several times, because `is_held` takes the lock for an instant."""
    for _ in range(_TRIES):
        fd = open_private(path, os.O_RDWR | os.O_CREAT, mode=LOCK_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            time.sleep(_RETRY_S)
        except BaseException:
            os.close(fd)
            raise
        else:
            if _is_at(path, fd):
                return fd
            os.close(fd)  # its last holder has deleted the file: start again with a new one

    raise LockedError(path)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:
        return False


def _kernel_has_lock_on(path: Path) -> bool:
    try:
        inode = f":{path.stat().st_ino} "
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return any(" FLOCK " in line and inode in line for line in locks.splitlines())
