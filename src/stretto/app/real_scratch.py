"""A folder for training that is only tried, of which at most the log of a failure is kept, elsewhere."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.app.disk_room import check_room
from stretto.app.real_stop import Stop, listening
from stretto.app.run_folder import RunFolder
from stretto.core.errors import InputError
from stretto.core.private_files import make_private_folder


@contextmanager
def scratch(purpose: str, *, log: Path | None = None, parent: Path | None = None) -> Iterator[RunFolder]:
    """The folder of a run that is thrown away, however the block ends, also by a signal.

    Where an InputError names the log of a training that failed, that is kept as `log`, and the error then
    names this. The folder is in `parent`, else where such things usually are.
    """
    stop = Stop()
    stop.impatient = True
    with (
        listening(stop),
        tempfile.TemporaryDirectory(
            prefix=f"stretto-{purpose}-", dir=parent, ignore_cleanup_errors=True
        ) as folder,
    ):
        try:
            check_room(Path(folder).parent)
            yield RunFolder(Path(folder))
        except InputError as error:
            raise _with_log_at(log, error, Path(folder)) from error


def _with_log_at(place: Path | None, error: InputError, folder: Path) -> InputError:
    """The same error, once the log that it names lies there; it names nothing that is thrown away."""
    remedy, where = error.remedy, "" if error.where == str(folder) else error.where
    if named := re.search(rf"\nlog: ({re.escape(str(folder))}[^\n]*)", remedy):
        kept = kept_log(Path(named[1]), place)
        remedy = remedy.replace(named[0], f"\nlog: {kept}" if kept else "")
    return InputError(error.problem, where=where, remedy=remedy)


def kept_log(log: Path, place: Path | None) -> str:
    """Where the log of training that was only tried lies from now on; empty: it could not be kept."""
    if place is None:
        return ""
    try:
        make_private_folder(place.parent)
        shutil.move(log, place)
    except OSError:  # what is wrong with the training is the news, not this
        return ""
    return str(place)
