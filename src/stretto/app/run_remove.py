"""Removing a run: its folder and nothing else, and only if no process works on it."""

from __future__ import annotations

import shutil
from pathlib import Path

from stretto.app.real_standing import check_free, holding
from stretto.app.run_folder import RunFolder
from stretto.app.run_list import MARKS
from stretto.core.errors import InputError
from stretto.core.plain_json import UnreadableError, read_json

_JOURNAL = b"SQLite format 3\0"


def check_removable(folder: RunFolder) -> None:
    """InputError unless it is the folder of a run that nobody works on, with nothing up that costs."""
    path = folder.path
    if path.is_symlink():
        raise InputError(
            f"is a link to {path.resolve()}, and links are not followed.",
            where=str(path),
            remedy=f"Remove the link with `rm {path}`, or name the folder itself.",
        )
    if not _is_surely_a_run(path):
        raise InputError(
            "is not surely the folder of a run: it has neither a spec.json of ours nor a journal.",
            where=str(path),
            remedy="Look at what is in it, and remove it by hand.",
        )
    check_free(folder)
    if up := sorted(one.stem for one in folder.nodes.glob("*.json")):
        raise InputError(
            f"{', '.join(up)} may still be up and cost, and only this folder says so.",
            where=str(folder.nodes),
            remedy="Start the run's command again, which ends what it does not need; or end them by hand and "
            "remove these files.",
        )


def remove_run(folder: RunFolder) -> None:
    """Everything in the folder, links themselves and not what they lead to; the marks of a run go last.

    So what a kill leaves behind is still known as a run, and can be removed again.
    """
    with holding(folder):
        for path in sorted(folder.path.iterdir()):
            if path.name not in MARKS:
                _remove(path)
        for mark in MARKS:
            if mark != folder.lock.name:
                _remove(folder.path / mark)
    # Letting go of the lock of a run that is not begun removes it, and the folder, as nothing is in it.


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_surely_a_run(path: Path) -> bool:
    """By what is in its files, not by their names alone; one that was only measured for has our profile."""
    try:
        with (path / "journal.sqlite").open("rb") as file:
            if file.read(len(_JOURNAL)) == _JOURNAL and file.read(84)[52:56] == b"STRT":
                return True
    except OSError:
        pass
    if (path / "journal.sqlite.lock").is_file():
        return True
    return _says(path / "spec.json", {"kind", "asked"}) or _says(path / "profile.json", {"format", "epochs"})


def _says(path: Path, keys: set[str]) -> bool:
    try:
        found = read_json(path)
    except (OSError, UnreadableError):
        return False
    return isinstance(found, dict) and keys <= found.keys()
