"""The main function of a worker process, and loading the user's training function."""

from __future__ import annotations

import functools
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.core.errors import InputError, StrettoError
from stretto.system.limits import limit_text, scarce_in
from stretto.system.private_files import make_private_folder, open_private
from stretto.torch.foreign import refuse_own_groups
from stretto.torch.group import DivergedError, PeerLostError
from stretto.torch.run import Run
from stretto.torch.session import GRACE_S, ControlledSession, StopTraining
from stretto.torch.state import seed_rngs
from stretto.wire.channel import connect
from stretto.wire.messages import Failed, Finished, Left, Task


def split_entry(entry: str) -> tuple[Path, str]:
    """The file and the function of an entry `FILE:FUNCTION`."""
    path, colon, function = entry.rpartition(":")
    if not colon or not path or not function.isidentifier():
        raise InputError(
            f"{entry!r} does not name a training function.",
            remedy="Write FILE:FUNCTION, such as train.py:train.",
        )
    return Path(path).absolute(), function


def load_entry(entry: str) -> Callable[..., Any]:
    """The training function; its file is imported once per process. Errors of the file itself are raised."""
    path, name = split_entry(entry)
    refuse_own_groups()
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(
            sorted(n for n, v in vars(module).items() if callable(v) and v.__module__ == module.__name__)
        )
        raise InputError(f"{path} has no function {name!r}.", remedy=f"It has: {there or 'none'}.")
    found: Callable[..., Any] = function
    return found


@functools.cache
def _load(path: Path) -> ModuleType:
    """Import a file under its own name, with its folder first in sys.path, like `python FILE`."""
    if not path.is_file():
        raise InputError(f"{path} is not a file.", remedy="Give the path of the training script.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.", remedy="Give the path of the training script.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def main(address: str, secret: str, worker_id: str) -> int:
    """Train one task after the other, as the controller asks; returns the exit code."""
    grace_s = float(os.environ.get("STRETTO_GRACE_S", str(GRACE_S)))
    signal.signal(signal.SIGTERM, _dismiss)
    session = ControlledSession(connect(address, secret, worker_id), grace_s=grace_s)
    try:
        task = session.next_task()
        while True:
            result = _train(session, task)
            sys.stdout.flush()
            sys.stderr.flush()
            session.send(result)
            if isinstance(result, Failed):
                return 1
            if not task.stays or result.leaves:
                return 0
            task = session.next_task()
            _write_to(Path(task.folder) / "stdout.log")
    except StopTraining:
        return 0


def _dismiss(number: int, frame: object) -> None:
    """Handle SIGTERM: stop training; a checkpoint that is being saved is still finished."""
    del number, frame
    raise StopTraining("dismissed", leaves=True)


def _write_to(log: Path) -> None:
    """Redirect output to the log of the next job."""
    make_private_folder(log.parent)
    fd = open_private(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _train(session: ControlledSession, task: Task) -> Finished | Failed | Left:
    run: Run | None = None
    try:
        train = load_entry(task.entry)
        seed_rngs(task.seed)
        run = Run(session=session)
        train(dict(task.config), run)
        run.finish()
    except StopTraining as departure:
        return Left(departure.why, saved=departure.saved, leaves=departure.leaves)
    except PeerLostError as error:
        print(f"stretto: {error}", file=sys.stderr)  # noqa: T201 - the job's log
        number = scarce_in(str(error))
        return Left("peer lost", leaves=True) if number is None else Failed(f"{error}: {limit_text(number)}")
    except StrettoError as error:
        print(error, file=sys.stderr)  # noqa: T201 - likewise
        return Failed(str(error), final=isinstance(error, DivergedError))
    except BaseException:  # noqa: BLE001 - any error of user code is reported
        text = traceback.format_exc()
        sys.stderr.write(text)
        return Failed(text)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if run is not None:
            run.finish_saving()
        signal.signal(signal.SIGTERM, _dismiss)
    gc.collect()  # frees models and loaders before the next task
    return Finished(leaves=bool(_children()))


def _children() -> list[str]:
    """Child processes that the training code left behind."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    except OSError:
        return [str(child.pid) for child in multiprocessing.active_children()]
