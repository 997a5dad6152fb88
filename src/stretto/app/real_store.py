"""Where the checkpoints of a run are kept for other nodes: a path or URL that fsspec knows."""

from __future__ import annotations

import contextlib
from pathlib import Path

from stretto.core.errors import InputError


def check_store(url: str) -> None:
    """InputError if nothing could ever be kept there."""
    try:
        import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InputError(
            "--store needs the package fsspec.", remedy="pip install 'stretto[store]'."
        ) from error
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
    except (ValueError, ImportError) as error:
        raise InputError(
            f"--store {url} cannot be used: {error}.",
            remedy="Give a folder, or a URL such as s3://bucket/runs or gs://bucket/runs whose package is "
            "installed wherever workers run.",
        ) from error


def store_of(store: str, run: str) -> str:
    """The part of a store that is one run's. A path is made absolute: workers may begin elsewhere."""
    whole = store if "://" in store else str(Path(store).absolute())
    return f"{whole.rstrip('/')}/{run}"


def empty_store(url: str) -> None:
    """Remove what was kept there for a moment only."""
    import fsspec  # noqa: PLC0415 - an extra

    with contextlib.suppress(Exception):  # what cannot be removed is in nobody's way
        files, path = fsspec.core.url_to_fs(url)
        files.rm(path, recursive=True)
