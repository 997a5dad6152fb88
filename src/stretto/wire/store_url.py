"""Checks the URL of a checkpoint store, on the command line and in every worker."""

from __future__ import annotations

from stretto.core.errors import InputError

UNCOPIED = "uncopied"
"""A file of this name beside a job's checkpoints means: not all of them are in the store."""


def check_store(url: str) -> None:
    """InputError if fsspec is not installed or cannot open this URL."""
    try:
        import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InputError(
            "checkpoints at a URL need the package fsspec.",
            where=f"store {url}",
            remedy="Install it wherever workers run: pip install 'stretto[store]'.",
        ) from error
    protocol = fsspec.utils.get_protocol(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise InputError(
            f"fsspec knows no protocol {protocol!r}.",
            where=f"store {url}",
            remedy="Give a folder, or a URL that it knows, such as s3://bucket/runs or gs://bucket/runs.",
        ) from error
    except ImportError as error:
        raise InputError(
            f"{protocol}:// needs a package that is not installed.",
            where=f"store {url}",
            remedy=f"fsspec says: {error}. Do that on every node where workers run.",
        ) from error
