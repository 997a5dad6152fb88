"""A worker process from its first word to its last."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path

from stretto.core.errors import StrettoError
from stretto.core.private_files import make_private_folder, open_private
from stretto.core.scarce import limit_text, scarce_in
from stretto.torch.entry import load_entry
from stretto.torch.group import DivergedError, PeerLostError
from stretto.torch.luggage import seed_chance
from stretto.torch.run import Run
from stretto.torch.session import GRACE_S, Controlled, Departure
from stretto.wire.channel import connect
from stretto.wire.messages import Failed, Finished, Left, Task


def main(address: str, secret: str, worker_id: str) -> int:
    """Train what the controller asks for, one task after the other; the exit code."""
    grace_s = float(os.environ.get("STRETTO_GRACE_S", str(GRACE_S)))
    signal.signal(signal.SIGTERM, _dismiss)
    session = Controlled(connect(address, secret, worker_id), grace_s=grace_s)
    try:
        task = session.next_task()
        while True:
            last_word = _train(session, task)
            sys.stdout.flush()
            sys.stderr.flush()
            session.send(last_word)
            if isinstance(last_word, Failed):
                return 1
            if not task.stays or last_word.leaves:
                return 0
            task = session.next_task()
            _write_to(Path(task.folder) / "stdout.log")
    except Departure:
        return 0


def _dismiss(number: int, frame: object) -> None:
    """Nobody needs this worker any more; what it is just saving may still be the best there is."""
    del number, frame
    raise Departure("dismissed", leaves=True)


def _write_to(log: Path) -> None:
    """From now on what is printed belongs to another job."""
    make_private_folder(log.parent)
    fd = open_private(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _train(session: Controlled, task: Task) -> Finished | Failed | Left:
    run: Run | None = None
    try:
        train = load_entry(task.entry)
        seed_chance(task.seed)
        run = Run(session=session)
        train(dict(task.config), run)
        run.finish()
    except Departure as departure:
        return Left(departure.why, saved=departure.saved, leaves=departure.leaves)
    except PeerLostError as error:
        print(f"stretto: {error}", file=sys.stderr)  # noqa: T201 - the job's own log
        number = scarce_in(str(error))
        return Left("peer lost", leaves=True) if number is None else Failed(f"{error}: {limit_text(number)}")
    except StrettoError as error:
        print(error, file=sys.stderr)  # noqa: T201 - likewise
        return Failed(str(error), final=isinstance(error, DivergedError))
    except BaseException:  # noqa: BLE001 - whatever user code raises is reported
        text = traceback.format_exc()
        sys.stderr.write(text)
        return Failed(text)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if run is not None:
            run.finish_saving()
        signal.signal(signal.SIGTERM, _dismiss)
    gc.collect()  # models and loaders of this task, before there is another
    return Finished(leaves=bool(_children()))


def _children() -> list[str]:
    """Processes that the training code has left."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    except OSError:
        return [str(child.pid) for child in multiprocessing.active_children()]
