"""A worker process from its first word to its last."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from stretto.core.errors import StrettoError
from stretto.torch.entry import load_entry
from stretto.torch.group import PeerLostError
from stretto.torch.luggage import seed_chance
from stretto.torch.run import Run
from stretto.torch.session import GRACE_S, Controlled, Departure
from stretto.wire.channel import connect
from stretto.wire.messages import Failed, Finished, FromWorker, Left


def main(address: str, secret: str, worker_id: str) -> int:
    """Train what the controller asks for; the exit code."""
    grace_s = float(os.environ.get("STRETTO_GRACE_S", str(GRACE_S)))
    signal.signal(signal.SIGTERM, _dismiss)
    session = Controlled(connect(address, secret, worker_id), grace_s=grace_s)
    last_word = _train(session)
    sys.stdout.flush()
    sys.stderr.flush()
    session.send(last_word)
    return 1 if isinstance(last_word, Failed) else 0


def _dismiss(number: int, frame: object) -> None:
    """Nobody needs this worker any more; what it is just saving may still be the best there is."""
    del number, frame
    raise Departure("dismissed")


def _train(session: Controlled) -> FromWorker:
    run: Run | None = None
    try:
        task = session.task
        train = load_entry(task.entry)
        seed_chance(task.seed)
        run = Run(session=session)
        train(dict(task.config), run)
        run.finish()
    except Departure as departure:
        return Left(departure.why, saved=departure.saved)
    except PeerLostError as error:
        print(f"stretto: {error}", file=sys.stderr)  # noqa: T201 - the job's own log
        return Left("peer lost")
    except StrettoError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return Failed(str(error))
    except BaseException:  # noqa: BLE001 - whatever user code raises is reported
        text = traceback.format_exc()
        sys.stderr.write(text)
        return Failed(text)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if run is not None:
            run.finish_saving()
    return Finished()
