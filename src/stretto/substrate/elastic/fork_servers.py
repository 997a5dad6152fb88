"""The controller's side of a fork server: the process from which the workers of one entry are forked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.system.private_files import private_opener

_SCRIPT = Path(__file__).parents[2] / "torch" / "fork_server.py"
_IMPORTING_S = 1.0
"""A fork server that still imports has no workers: it must leave within this, or is killed."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The functions that a fork server and its workers run, by name."""

    worker: str = "stretto.torch.worker:main"
    """Called in a worker, with the controller's address, the secret and the worker's id."""
    load: str = "stretto.torch.worker:load_entry"
    """Called with an entry, to import the user's code."""
    preload: tuple[str, ...] = ("torch", "torch._dynamo", "stretto.torch")
    """Modules that are imported first. The first optimizer needs torch._dynamo, which takes seconds."""
    imports_entry: bool = True


NO_ENTRY = ""
"""The entry of all jobs that run a command: one light fork server starts the workers of all of them."""
_COMMANDS = Trainer(
    worker="stretto.substrate.elastic.command_worker:main", load="", preload=(), imports_entry=False
)


def trainer_of(entry: str, trainer: Trainer) -> Trainer:
    """What runs in the fork server of an entry, if functions have this trainer."""
    return _COMMANDS if entry == NO_ENTRY else trainer


def training_env(*, threads: int, grace_s: float) -> dict[str, str]:
    """Environment variables for training code."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "STRETTO_GRACE_S": str(grace_s),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a check with CUDA would make the process unfit to fork
    }


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """What a fork server says about a worker."""

    kind: str
    """born, gone, import-failed or note; or ready, without a worker."""
    worker: str
    pid: int = 0
    code: int | None = None
    error: str = ""
    number: int = 0
    """The number of the error that prevented its start."""
    text: str = ""
    """The text of a note for the user."""


class ForkServerProcess:
    """Starts the process. `on_news` and `on_end` are called from a thread of its own."""

    def __init__(
        self,
        entry: str,
        trainer: Trainer,
        *,
        grace_s: float,
        env: Mapping[str, str],
        log: Path,
        lock_fd: int,
        on_news: Callable[[WorkerNews], None],
        on_end: Callable[[], None],
    ) -> None:
        self._grace_s = grace_s
        self._pids: dict[str, int] = {}
        self._is_ready = False
        settings = {"entry": entry, **asdict(trainer), "grace_s": grace_s}
        self._line, theirs = socket.socketpair()
        arguments = [str(_SCRIPT), str(theirs.fileno()), json.dumps(settings)]
        with theirs, open(log, "ab", opener=private_opener) as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own script
                [sys.executable, "-P", *arguments],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), lock_fd),
                start_new_session=True,
            )
        self._listener = threading.Thread(
            target=self._listen, args=(on_news, on_end), name=f"fork server {entry}", daemon=True
        )
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None:
        self._tell(do="spawn", worker=worker, address=address, secret=secret, log=str(log), env=dict(env))

    def end(self, worker: str) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        self._tell(do="end", worker=worker)

    def kill(self, worker: str) -> None:
        self._tell(do="kill", worker=worker)

    def close(self) -> None:
        """Let it end its workers and itself; does not wait."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def wait(self, patience_s: float) -> None:
        """Wait until nothing is left of it. If it still imports, it is killed."""
        self._listener.join(patience_s if self._is_ready else min(patience_s, _IMPORTING_S))
        if self._listener.is_alive():
            self._process.kill()  # the kernel then kills its workers
            self._listener.join()

    def _tell(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # it was killed; the listener says so
            self._line.sendall(json.dumps(fields).encode() + b"\n")

    def _listen(self, on_news: Callable[[WorkerNews], None], on_end: Callable[[], None]) -> None:
        with self._line, self._line.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                fields = json.loads(line)
                news = WorkerNews(fields.pop("say"), **fields)
                match news.kind:
                    case "ready":
                        self._is_ready = True
                    case "born":
                        self._pids[news.worker] = news.pid
                    case "gone" | "import-failed":
                        self._pids.pop(news.worker, None)
                on_news(news)
        self._process.wait()
        for (
            pid
        ) in self._pids.values():  # it was killed, and its workers with it, but perhaps not their children
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        on_end()
