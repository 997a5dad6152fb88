"""Whether there is room on the disk for a run, seen before anything is measured or trained."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from stretto.core.errors import InputError

LEAST_BYTES = 1 << 20
"""A journal and the files around it need this much soon, without any checkpoint."""
TRIED_BYTES = 1 << 16


def check_room(folder: Path, *, least_bytes: int = LEAST_BYTES) -> None:
    """InputError with the path and the bytes that are free, if a run could not be written there."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < least_bytes:
        raise _no_room(folder, f"a run needs {least_bytes:,} bytes at least, without checkpoints", free_bytes)
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # there may be a quota
            written_bytes = file.write(bytes(TRIED_BYTES))
    except OSError as error:
        raise _no_room(folder, f"it cannot be written: {error.strerror}", free_bytes) from error
    if written_bytes < TRIED_BYTES:
        raise _no_room(
            folder, f"only {written_bytes:,} of {TRIED_BYTES:,} bytes could be written", free_bytes
        )


def _no_room(folder: Path, why: str, free_bytes: int) -> InputError:
    return InputError(
        f"{why}; {free_bytes:,} bytes are free there.",
        where=str(folder),
        remedy="Make room, or run where files may be written.",
    )
