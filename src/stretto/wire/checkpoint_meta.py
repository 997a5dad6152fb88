"""What is known of a checkpoint without reading it: the small file beside its state."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.core.errors import InputError

FORMAT = 1
STATE_FILE = "state.pt"
META_FILE = "meta.json"
_DIGITS = 8


class CorruptError(Exception):
    """What is wrong with a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What stands in the small file."""

    format: int
    progress: float
    best: bool
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Best:
    """Where the best checkpoint is, and the progress it stands for."""

    path: Path
    progress: float


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those of a job that are all written, the newest first: names are serial numbers."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:  # not there yet
        return []
    whole = [name for name in names if name.isdecimal() and len(name) == _DIGITS]
    return [folder / name for name in sorted(whole, reverse=True)]


def newest_best(folder: Path) -> Best | None:
    """The newest checkpoint of a job that was saved as the best."""
    for path in whole_checkpoints(folder):
        with contextlib.suppress(CorruptError):
            meta = read_meta(path)
            if meta.best:
                return Best(path / STATE_FILE, meta.progress)
    return None


def read_meta(folder: Path) -> Meta:
    path = folder / META_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(f"{META_FILE} is missing") from error
    return parse_meta(content, str(path))


def parse_meta(content: bytes, where: str) -> Meta:
    """InputError if another version of Stretto wrote it, CorruptError if nobody did."""
    try:
        values = json.loads(content)
        found = values["format"]
        if found == FORMAT:
            meta = Meta(**values)
            return replace(meta, progress=float(meta.progress))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"{META_FILE} cannot be read, {error}") from error
    raise InputError(
        f"this checkpoint has format {found}, and only {FORMAT} is known here.",
        where=where,
        remedy="Go on with the version of Stretto that wrote it, or give this run another name.",
    )
