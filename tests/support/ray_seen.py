"""Where the workers of a run really are, read off their processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A live worker process."""

    pid: int
    job_id: str
    raylet: int
    """The process of the node whose agent had it started."""
    gpus: str
    """As the stub says it was given them."""


def seen_workers(folder: Path) -> list[SeenWorker]:
    """All workers of the run in this folder, which must be stubs."""
    workers = (_worker(entry, folder) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [worker for worker in workers if worker is not None]


def _worker(entry: Path, folder: Path) -> SeenWorker | None:
    """None for another process, one that is just ending, or one that has not said a word."""
    try:
        if str(folder).encode() not in (entry / "cmdline").read_bytes():
            return None
        log = (entry / "fd" / "1").readlink()
        if not log.is_relative_to(folder / "jobs"):
            return None
        raylet = re.search(rb"\0RAY_RAYLET_PID=(\d+)\0", b"\0" + (entry / "environ").read_bytes() + b"\0")
        said = re.findall(rf"process {entry.name} on slot \d+ gpus ([\d,]*)\n", log.read_text())
    except OSError:
        return None
    if raylet is None or not said:
        return None
    return SeenWorker(int(entry.name), log.parent.name, int(raylet[1]), said[-1])
