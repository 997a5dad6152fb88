"""Where the checkpoints of a run are kept for other nodes: a path or URL that fsspec knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.system.identity import ID_FILE, identity, known_identity


def store_of(store: str, run: str) -> str:
    """The part of a store that is one run's. A path is made absolute: workers may begin elsewhere."""
    whole = store if "://" in store else str(Path(store).absolute())
    return f"{whole.rstrip('/')}/{run}"


def check_unclaimed(store: str, run_dir: Path) -> None:
    """InputError if the run's part of a store is another run's: training would go on from its weights."""
    url = store_of(store, run_dir.name)
    with _opened(url) as (files, place):
        kept, names = _claim(files, place), _names(files, place)
    if kept is None and not names:
        return
    if kept is None or kept != known_identity(run_dir):
        raise InputError(
            f"{url} has the checkpoints of another run{' of this name' if kept else ''}, and each run has "
            "a place of its own.",
            remedy="Give another --name or --store; or remove what is there, if nobody needs it.",
        )


def claim(store: str, run_dir: Path) -> None:
    """Make that part of a store the run's own; InputError if it is another's."""
    check_unclaimed(store, run_dir)
    own = identity(run_dir)
    with _opened(store_of(store, run_dir.name)) as (files, place):
        if _claim(files, place) is None:
            files.makedirs(place, exist_ok=True)
            files.pipe_file(f"{place}/{ID_FILE}", own.encode("ascii"))


def empty_store(url: str) -> None:
    """Remove what was kept there for a moment only."""
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

    with contextlib.suppress(Exception):  # what cannot be removed is in nobody's way
        files, path = fsspec.core.url_to_fs(url)
        files.rm(path, recursive=True)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[tuple[Any, str]]:
    """The file system, and what it calls the place; InputError for whatever it raises."""
    import fsspec  # noqa: PLC0415 - an extra

    try:
        files, place = fsspec.core.url_to_fs(url)
        files.invalidate_cache()  # somebody else may have written
        yield files, place.rstrip("/")
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(
            f"cannot be used: {': '.join(filter(None, (type(error).__name__, first_line)))}.",
            where=url,
            remedy="Make it a place that can be read and written; or give another --store.",
        ) from error


def _claim(files: Any, place: str) -> str | None:
    """Whose it is; None if nobody has said so."""
    try:
        return bytes(files.cat_file(f"{place}/{ID_FILE}")).decode("ascii", errors="replace") or None
    except FileNotFoundError:
        return None


def _names(files: Any, place: str) -> list[str]:
    """What is there besides the claim, which a kill may have cut short."""
    try:
        found = [str(one).rstrip("/").rpartition("/")[2] for one in files.ls(place, detail=False)]
    except FileNotFoundError:
        return []
    return [name for name in found if name != ID_FILE]
