"""Beginning and resuming a run: the same request, a place of its own, and room on the disk."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.runs.folder import Kind, RunFolder, RunSpec, Tables
from stretto.runs.store import claim
from stretto.system.private_files import make_private_folder


def begin(folder: RunFolder, spec: RunSpec) -> RunSpec:
    """The specification as it was first written; its place in a store, if it has one, is its own."""
    begun = folder.spec()
    if begun is not None:
        check_same(folder, begun, spec.kind, spec.asked)
    try:
        make_private_folder(folder.path)
        if store := spec.asked.get("store"):
            claim(store, folder.path)
        if begun is None:
            folder.write("spec", dataclasses.asdict(spec))
    except OSError as error:
        raise InputError(
            f"{folder.path} cannot be written: {error.strerror}.", remedy="Run where files may be written."
        ) from error
    return begun or spec


def check_same(folder: RunFolder, begun: RunSpec, kind: Kind, asked: Tables) -> None:
    """Refuse to resume a run with another specification, and tell the difference.

    How its nodes are launched may be mended.
    """
    if begun.kind != kind:
        raise InputError(
            f"{folder.path} was begun by `stretto {begun.kind}`.",
            remedy=f"Give `stretto {kind}` another --name, or move the folder away.",
        )
    changed = [text for text in differences(begun.asked, asked) if not text.startswith("study.ray.")]
    if changed:
        raise InputError(
            f"{folder.path} was begun otherwise: {'; '.join(changed)}.",
            remedy="Use what it was begun with to resume it, or another --name to begin anew; a study may be "
            "given a later deadline or a larger budget.",
        )


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """What differs between two pieces of JSON data, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} was {_value_text(old)} and is {_value_text(new)}"


def _value_text(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)


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
