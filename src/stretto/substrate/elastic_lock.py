"""One run folder, one run: a lock that is free only when nothing of an earlier run is left."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.private_files import LOCK_MODE, make_private_folder, open_private

_LOOK_S = 0.05


class RunLock:
    """Held by whoever has the descriptor, so also by the processes that inherit it."""

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
                    remedy="Wait until that has ended or stop it, or give this run another name.",
                )
            time.sleep(_LOOK_S)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Give up this process's part of it."""
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
    except OSError:  # it ended meanwhile, or is somebody else's
        return False
