"""The place in a --store that belongs to one run: a path or a URL that fsspec can open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.system.identity import ID_FILE, identity, known_identity


def store_of(store: str, run: str) -> str:
    """The place of one run in a store. Paths become absolute, as workers may start in another folder."""
    whole = store if "://" in store else str(Path(store).absolute())
    return f"{whole.rstrip('/')}/{run}"


def check_unclaimed(store: str, run_dir: Path) -> None:
    """Refuse a place that belongs to another run: training would continue from that run's weights."""
    url = store_of(store, run_dir.name)
    with _opened(url) as (files, place):
        kept, names = _claim(files, place), _names(files, place)
    if kept is None and not names:
        return
    if kept is None or kept != known_identity(run_dir):
        raise InputError(
            f"{url} has the checkpoints of another run{' of this name' if kept else ''}.",
            remedy="Give another --name or --store, or remove what is there if you do not need it.",
        )


def claim(store: str, run_dir: Path) -> None:
    """Reserve the run's place in a store; InputError if another run has it."""
    check_unclaimed(store, run_dir)
    own = identity(run_dir)
    with _opened(store_of(store, run_dir.name)) as (files, place):
        if _claim(files, place) is None:
            files.makedirs(place, exist_ok=True)
            files.pipe_file(f"{place}/{ID_FILE}", own.encode("ascii"))


def empty_store(url: str) -> None:
    """Remove everything there."""
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

    with contextlib.suppress(Exception):  # what cannot be removed does no harm
        files, path = fsspec.core.url_to_fs(url)
        files.rm(path, recursive=True)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[tuple[Any, str]]:
    """The file system and its path of the place; any error becomes an InputError."""
    import fsspec  # noqa: PLC0415 - an extra

    try:
        files, place = fsspec.core.url_to_fs(url)
        files.invalidate_cache()  # other processes may have written
        yield files, place.rstrip("/")
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(
            f"cannot be used: {': '.join(filter(None, (type(error).__name__, first_line)))}.",
            where=url,
            remedy="Make it a place that can be read and written; or give another --store.",
        ) from error


def _claim(files: Any, place: str) -> str | None:
    """The id of the run that reserved the place; None if none has."""
    try:
        return bytes(files.cat_file(f"{place}/{ID_FILE}")).decode("ascii", errors="replace") or None
    except FileNotFoundError:
        return None


def _names(files: Any, place: str) -> list[str]:
    """The names of all files there except the id, which may be missing after a kill."""
    try:
        found = [str(one).rstrip("/").rpartition("/")[2] for one in files.ls(place, detail=False)]
    except FileNotFoundError:
        return []
    return [name for name in found if name != ID_FILE]
