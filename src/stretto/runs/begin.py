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
    """Write the specification of a new run and reserve its place in the store; returns the first one."""
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
    """Refuse to resume a run with another specification, and say what differs.

    Only the commands that launch nodes may differ.
    """
    if begun.kind != kind:
        raise InputError(
            f"{folder.path} was begun by `stretto {begun.kind}`.",
            remedy=f"Give `stretto {kind}` another --name, or move the folder away.",
        )
    changed = list(differences(_without_launchers(begun.asked), _without_launchers(asked)))
    if changed:
        raise InputError(
            f"{folder.path} was begun with other settings: {'; '.join(changed)}.",
            remedy="Resume it with the same settings, or begin another run with a new --name. A study may "
            "get a later deadline or a larger budget.",
        )


def _without_launchers(asked: Tables) -> Tables:
    """The settings without [ray], which says how nodes are launched."""
    study = asked.get("study")
    return asked if study is None else {**asked, "study": {**study, "ray": "ray" in study}}


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """The differences between two pieces of JSON data, as clauses."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} was {_value_text(old)} and is {_value_text(new)}"


def _value_text(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)


LEAST_BYTES = 1 << 20
"""What a journal and the files around it need, without checkpoints."""


TRIED_BYTES = 1 << 16


def check_room(folder: Path, *, least_bytes: int = LEAST_BYTES) -> None:
    """Refuse a folder without room for a run, with the bytes that are free there."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < least_bytes:
        raise _no_room(folder, f"a run needs {least_bytes:,} bytes at least, without checkpoints", free_bytes)
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # a quota may apply
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
