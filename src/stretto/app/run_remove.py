"""Removing a run: its folder and nothing else, and only if no process works on it."""

from __future__ import annotations

import shutil
from pathlib import Path

from stretto.app.real_standing import check_free, holding
from stretto.app.run_folder import RunFolder
from stretto.app.run_list import MARKS
from stretto.core.errors import InputError
from stretto.core.file_lock import holder_of, is_held
from stretto.core.plain_json import UnreadableError, read_json
from stretto.core.units import several
from stretto.substrate.run_identity import ID_FILE

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
    _check_jobs_ended(folder)
    if up := sorted(one.stem for one in folder.nodes.glob("*.json")):
        raise InputError(
            f"{', '.join(up)} may still be up and cost, and only this folder says so.",
            where=str(folder.nodes),
            remedy="Start the run's command again, which ends what it does not need; or end them by hand and "
            "remove these files.",
        )


def remove_run(folder: RunFolder) -> None:
    """Everything in the folder, links themselves and not what they lead to; the marks of a run go last.

    So what a kill leaves behind is still known as a run, and can be removed again. Its identity goes just
    before them: no other run of that name may take over its part of a store.
    """
    last = (ID_FILE, *MARKS)
    with holding(folder):
        _check_jobs_ended(folder)
        try:
            for path in sorted(folder.path.iterdir()):
                if path.name not in last:
                    _remove(path)
            for name in last:
                if name != folder.lock.name:
                    _remove(folder.path / name)
        except OSError as error:
            raise InputError(
                f"could not be removed whole: {error.filename or folder.path}: {error.strerror}.",
                where=str(folder.path),
                remedy="See that nothing writes there and that you may remove it, then give the same command "
                "again: what is left is still known as a run.",
            ) from error
    # Letting go of the lock of a run that is not begun removes it, and the folder, as nothing is in it.


def _check_jobs_ended(folder: RunFolder) -> None:
    """Processes of jobs outlive a controller that was killed, for as long as they may save."""
    locks = [*sorted((folder.path / "jobs").glob("*/lock")), folder.path / "lock"]
    held = [lock for lock in locks if is_held(lock)]
    if not held:
        return
    jobs = [lock.parent.name for lock in held if lock.parent != folder.path]
    raise InputError(
        f"processes of {several(jobs) if jobs else 'its jobs'} are still ending, and write there.",
        where=str(folder.path),
        remedy="Wait until they have ended, then give the same command again.",
    )


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
    return (
        _is_lock(path / "journal.sqlite.lock")
        or _says(path / "spec.json", {"kind", "asked"})
        or _says(path / "profile.json", {"format", "epochs"})
    )


def _is_lock(path: Path) -> bool:
    """Of version 0.1, which leaves it empty, or one that says who holds it."""
    try:
        return path.is_file() and (not path.stat().st_size or holder_of(path) is not None)
    except OSError:
        return False


def _says(path: Path, keys: set[str]) -> bool:
    try:
        found = read_json(path)
    except (OSError, UnreadableError):
        return False
    return isinstance(found, dict) and keys <= found.keys()
