"""What can be known of checkpoints without torch: their meta.json, and whether a store can hold them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.system.plain_json import UnreadableError, checksum, parse_json

FORMAT = 2
UNCHECKED_FORMAT = 1
"""The format of version 0.1, without a checksum over meta.json."""
STATE_FILE = "state.pt"
META_FILE = "meta.json"
CHECK = "check"
"""The key of the checksum over all other keys, in any format."""
UNCOPIED = "uncopied"
"""A file of this name beside a job's checkpoints means: not all of them are in the store."""
_DIGITS = 8
_MOST_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CorruptError(Exception):
    """A checkpoint is damaged; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """The content of meta.json."""

    format: int
    progress: float
    best: bool
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The state file of the best checkpoint, and its progress in epochs."""

    path: Path
    progress: float


def whole_checkpoints(folder: Path) -> list[Path]:
    """The completely written checkpoints of a job, newest first: names are serial numbers."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:  # the folder does not exist yet
        return []
    whole = [name for name in names if name.isdecimal() and len(name) == _DIGITS]
    return [folder / name for name in sorted(whole, reverse=True)]


def newest_best(folder: Path) -> BestCheckpoint | None:
    """The newest checkpoint of a job that was saved as the best."""
    for path in whole_checkpoints(folder):
        with contextlib.suppress(CorruptError):
            meta = read_meta(path)
            if meta.best:
                return BestCheckpoint(path / STATE_FILE, meta.progress)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCheckpoints:
    """The state files of a job's usable checkpoints, judged without reading them."""

    best: Path | None
    newest: Path | None
    damaged: tuple[str, ...]
    """A sentence for each unusable one, newest first."""


def usable_checkpoints(folder: Path) -> UsableCheckpoints:
    """For displays: changes nothing and raises nothing."""
    best: Path | None = None
    newest: Path | None = None
    damaged = [f"{path}: it was found damaged and set aside" for path in _set_aside(folder)]
    for path in whole_checkpoints(folder):
        try:
            meta = read_meta(path)
            _check_size(path / STATE_FILE, meta)
        except (CorruptError, OSError) as error:
            damaged.append(f"{path}: {error}")
            continue
        except InputError as error:
            damaged.append(f"{path}: {error.problem}")
            continue
        newest = newest or path / STATE_FILE
        best = best or (path / STATE_FILE if meta.best else None)
    return UsableCheckpoints(best=best, newest=newest, damaged=tuple(damaged))


def _set_aside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob(f"{'[0-9]' * _DIGITS}.corrupt"), reverse=True)
    except OSError:
        return []


def _check_size(state: Path, meta: CheckpointMeta) -> None:
    try:
        found_bytes = state.stat().st_size
    except FileNotFoundError as error:
        raise CorruptError(f"{STATE_FILE} is missing") from error
    if found_bytes != meta.size_bytes:
        raise CorruptError(f"{STATE_FILE} has {found_bytes} bytes instead of {meta.size_bytes}")


def meta_text(meta: CheckpointMeta) -> str:
    """The text of meta.json."""
    values = asdict(meta)
    return json.dumps({**values, CHECK: checksum(values)})


def read_meta(folder: Path) -> CheckpointMeta:
    """Read meta.json. CorruptError if it is damaged; OSError for temporary errors, such as too many files."""
    path = folder / META_FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CorruptError(f"{META_FILE} has more than {_MOST_BYTES} bytes")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(f"{META_FILE} is missing") from error
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise CorruptError(f"{META_FILE} cannot be read, {error.strerror}") from error
    return parse_meta(content, str(path))


def parse_meta(content: bytes, where: str) -> CheckpointMeta:
    """Parse meta.json. InputError if another version of Stretto wrote it, CorruptError if it is damaged."""
    try:
        values = parse_json(content)
    except UnreadableError as error:
        raise CorruptError(f"{META_FILE} cannot be read, {error}") from error
    if not isinstance(values, dict):
        raise CorruptError(f"{META_FILE} cannot be read, it is not an object")
    found = values.get("format")
    if found != UNCHECKED_FORMAT or CHECK in values:
        check = values.pop(CHECK, None)
        if check != checksum(values):
            raise CorruptError(f"{META_FILE} does not match its checksum")
        if found != FORMAT:
            raise InputError(
                f"this checkpoint has format {found}, but we read {UNCHECKED_FORMAT} and {FORMAT}.",
                where=where,
                remedy="Use the version of Stretto that wrote it, or give this run another name.",
            )
    return _meta(values)


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


def _meta(values: dict[str, Any]) -> CheckpointMeta:
    match values:
        case {
            "format": int(number),
            "progress": int(progress) | float(progress),
            "best": bool(best),
            "size_bytes": int(size_bytes),
            "sha256": str(sha256),
            **others,
        } if not others and size_bytes >= 0 and _SHA256.fullmatch(sha256) and 0 <= progress < math.inf:
            return CheckpointMeta(
                format=number,
                progress=float(progress),
                best=best,
                size_bytes=size_bytes,
                sha256=sha256,
            )
        case _:
            raise CorruptError(f"{META_FILE} cannot be read, it does not say what a checkpoint must")
