"""The URL of a store, which a command is given and every worker is told: the same rule at both ends."""

from __future__ import annotations

from stretto.core.errors import InputError

UNCOPIED = "uncopied"
"""A file of this name beside a job's checkpoints says that the store lacks one of them."""


def check_store(url: str) -> None:
    """InputError if nothing could ever be kept there: fsspec is not installed, or does not know it."""
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
            remedy=f"fsspec says: {error}. Do so wherever workers run.",
        ) from error
