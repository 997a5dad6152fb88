"""Workers of a script, launched as torchrun launches them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RANKS = 2


@dataclass(frozen=True)
class Ended:
    """What a worker printed last, and its exit code."""

    last_line: str
    code: int


def launched(script: Path | str, *arguments: str) -> list[Ended]:
    """All workers of this script, when they have ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    env={**os.environ, **env, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(RANKS)
        ]
        for worker in workers:
            stack.callback(worker.kill)
        said = [worker.communicate(timeout=180)[0].splitlines()[-1] for worker in workers]
        return [Ended(last, worker.wait()) for last, worker in zip(said, workers, strict=True)]
