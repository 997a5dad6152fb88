"""The id of a run, and a lock that is free once no process of an earlier run is left."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from stretto.core.errors import InputError
from stretto.system.private_files import LOCK_MODE, make_private_folder, open_private, write_private

ID_FILE = "id"


def identity(run_dir: Path) -> str:
    """The id of the run in this folder; made if there is none."""
    found = known_identity(run_dir)
    if found is None:
        found = secrets.token_hex(16)
        write_private(run_dir / ID_FILE, found.encode("ascii"))
    return found


def folder_identity(run_dir: Path) -> str:
    """An id that stays if the folder is moved within its file system, but differs for a copy."""
    found, status = identity(run_dir), run_dir.stat()
    return f"{found}:{status.st_dev}:{status.st_ino}"


def known_identity(run_dir: Path) -> str | None:
    """The id of the run in this folder; None if it has none yet."""
    try:
        return (run_dir / ID_FILE).read_text(encoding="ascii", errors="replace") or None
    except FileNotFoundError:
        return None


_RETRY_S = 0.05


class RunLock:
    """A lock on an open file, held until every process that inherited its descriptor has closed it."""

    def __init__(self, path: Path, patience_s: float) -> None:
        make_private_folder(path.parent)
        self.fd = open_private(path, os.O_RDWR | os.O_CREAT, mode=LOCK_MODE)
        end_s = time.monotonic() + patience_s
        while not self._taken():
            if time.monotonic() > end_s:
                os.close(self.fd)
                raise InputError(
                    f"the folder is in use by {_holders(path)}.",
                    where=str(path.parent),
                    remedy="Wait until it ends, stop it, or give this run another name.",
                )
            time.sleep(_RETRY_S)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Close this process's descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _holders(path: Path) -> str:
    """The processes that have the lock open."""
    wanted = path.stat()
    processes = [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]
    holding = [pid for pid in sorted(processes) if _has_open(Path(f"/proc/{pid}/fd"), wanted)]
    others = [str(pid) for pid in holding if pid != os.getpid()]
    return f"process {', '.join(others)}" if others else "another run of this process"


def _has_open(folder: Path, wanted: os.stat_result) -> bool:
    try:
        return any(os.path.samestat(wanted, link.stat()) for link in folder.iterdir() if link.exists())
    except OSError:  # it has ended, or runs as another user
        return False
