"""Lists, stops and removes runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import InputError, JournalError, StrettoError
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobSubmitted,
    NoteKind,
    RunResumed,
)
from stretto.core.units import several
from stretto.inputs.fields import is_folder_name
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RUNS, RunFolder, RunSpec, no_such_run
from stretto.runs.live_state import JobPhase, LiveState
from stretto.runs.results import kept_checkpoint
from stretto.runs.status import RunStatus, check_free, ending_of, holding, is_going_on, status_of
from stretto.system.identity import ID_FILE
from stretto.system.locks import Holder, holder_of, is_held
from stretto.system.plain_json import UnreadableError, read_json
from stretto.system.private_files import write_private

MEASURING = "measuring"
RUNNING = "running"
FINISHED = "finished"
NOT_BEGUN = "not begun"
"""Only measured, or ended before its first start."""
DAMAGED = "damaged"
STATES = {
    RunStatus.UNFINISHED: RUNNING,
    EndedBy.JOBS: FINISHED,
    EndedBy.DEADLINE: "deadline came",
    EndedBy.BUDGET: "budget spent",
}
"""The names of states in the list, where they differ."""
MARKS = ("spec.json", "journal.sqlite", "journal.sqlite.lock", "profile.json", "failed.log")
"""A folder with one of these files is the folder of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run, as listed."""

    name: str
    path: Path
    kind: str
    """tune or run; empty if not known."""
    state: str
    """running, measuring, stopped, interrupted, finished, deadline came, budget spent, not begun, damaged."""
    best: str
    """The best value of a study; the number of finished jobs."""
    best_metric: float | None
    age_s: float
    """Seconds since its first start; if it has not begun, since its folder changed."""
    size_bytes: int
    command: str
    """The command that began it; empty if not known."""
    pid: int | None
    """The process that works on it."""
    problem: str = ""
    """What is wrong with its files."""


def list_runs(runs: Path = RUNS, *, now_s: float | None = None) -> tuple[RunInfo, ...]:
    """Every run in a folder, the newest first."""
    now_s = time.time() if now_s is None else now_s
    try:
        found = [run_info(RunFolder(path), now_s) for path in runs.iterdir() if is_run_folder(path)]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror}).", where=str(runs), remedy="Name a folder of runs."
        ) from error
    return tuple(sorted(found, key=lambda line: (line.age_s, line.name)))


def is_run_folder(path: Path) -> bool:
    """Whether this folder has files of a run."""
    if path.name.startswith("."):
        return False
    try:
        return path.is_dir() and any((path / mark).is_file() for mark in MARKS)
    except OSError:
        return False


def run_info(folder: RunFolder, now_s: float) -> RunInfo:
    """The line of one run. Damage to its files becomes its `problem`."""
    spec: RunSpec | None = None
    state, best, best_metric, problem = NOT_BEGUN, "", None, ""
    going_on = is_going_on(folder)
    holder = holder_of(folder.lock) if going_on else None
    try:
        spec = folder.spec()
        if spec is None:
            if folder.journal.exists():
                raise InputError("spec.json is missing, and there is a journal.", where=str(folder.path))
            state = MEASURING if going_on else NOT_BEGUN
        else:
            state, best, best_metric = _state_and_best(folder, spec)
            problem = folder.damage()
    except (StrettoError, OSError) as error:
        state, problem = RUNNING if going_on else DAMAGED, str(error)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        state = RUNNING if going_on else DAMAGED
        problem = f"{folder.path}: its journal is damaged ({error!r})."
    return RunInfo(
        name=folder.name,
        path=folder.path,
        kind="" if spec is None else spec.kind,
        state=state,
        best=best,
        best_metric=best_metric,
        age_s=max(now_s - (_changed_s(folder, now_s) if spec is None else spec.started_at_s), 0.0),
        size_bytes=sum(_sizes(folder.path)),
        command=_command(spec) or ("" if holder is None else holder.command),
        pid=None if holder is None else holder.pid,
        problem=problem,
    )


def _state_and_best(folder: RunFolder, spec: RunSpec) -> tuple[str, str, float | None]:
    """State, best in words, and the best value."""
    study = spec.study
    live, last = LiveState(study), None
    for event in folder.events():
        live.observe(event)
        last = event
    status = ending_of(folder) or status_of(folder, last)
    state = STATES.get(status, str(status))
    if study is None:
        done = sum(line.phase is JobPhase.FINISHED for line in live.jobs.values())
        failed = sum(line.phase is JobPhase.FAILED for line in live.jobs.values())
        done_of = f"{done} of {len(spec.asked.get('works') or live.jobs)} done"
        return state, f"{done_of}, {failed} failed" if failed else done_of, None
    line = live.best()
    value = None if line is None else live.best_value(line)
    return state, "" if value is None else f"{study.metric} {value:.4g}", value


def _command(spec: RunSpec | None) -> str:
    if spec is None:
        return ""
    return spec.command or " ".join(filter(None, ("stretto", spec.kind, spec.file)))


def _changed_s(folder: RunFolder, now_s: float) -> float:
    try:
        return folder.path.stat().st_mtime
    except OSError:
        return now_s


def _sizes(folder: Path) -> Iterator[int]:
    """The sizes of all files in a folder; links are not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118 - there may be many
            except OSError:  # it was removed
                continue


def find_folder(run: str, runs: Path = RUNS) -> RunFolder:
    """The folder of a run, even if it is damaged or was only measured: a name under `runs`, or a path."""
    places = [runs / run] if is_folder_name(run) else []
    for path in (*places, Path(run)):
        if is_run_folder(path):
            return RunFolder(path)
    there = [path.name for path in runs.iterdir() if is_run_folder(path)] if runs.is_dir() else []
    if "/" in run and Path(run).exists():
        raise InputError(
            f"{run} is not the folder of a run.",
            remedy=f"It has none of {', '.join(MARKS[:3])}. `stretto runs` lists those in {runs}/.",
        )
    raise no_such_run(run, sorted(there), runs)


def jobs_of(folder: RunFolder) -> list[str]:
    """The names of a run's jobs, from its journal and their folders."""
    names: dict[str, None] = {}
    with suppress(JournalError, OSError):
        submitted = (event for event in folder.events() if isinstance(event, JobSubmitted))
        names.update((event.job.id, None) for event in submitted)
    with suppress(OSError):
        folders = (one.name for one in (folder.path / "jobs").iterdir() if one.is_dir())
        names.update(dict.fromkeys(sorted(folders)))
    return list(names)


SECOND_S = 0.5
"""The time between two signals, as signals that arrive together count once."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJobs:
    """What the jobs of a stopped run have saved."""

    saved: tuple[str, ...]
    """Jobs that will continue from a checkpoint, with their epoch."""
    unsaved: tuple[str, ...]
    """Jobs that did not save when asked."""
    own: tuple[str, ...]
    """Jobs whose command keeps its own checkpoints, if any."""


def ask_to_stop(folder: RunFolder, *, at_once: bool) -> Holder | None:
    """Signal a run's process to stop, as Ctrl-C does; `at_once` is a second Ctrl-C. Returns the process.

    None if the run has ended. A second request without `at_once` is not sent, as the run is already stopping.
    """
    holder = _controller(folder)
    if holder is None:
        return None
    asked = _was_asked(folder, holder)
    if not asked:
        with suppress(OSError):  # a full disk must not prevent stopping
            write_private(folder.stop_asked, _token(holder))
        try:
            os.kill(holder.pid, signal.SIGTERM)
        except ProcessLookupError:
            with suppress(OSError):
                folder.stop_asked.unlink(missing_ok=True)
            return None
    if at_once:
        if not asked:
            time.sleep(SECOND_S)
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGTERM)
    return holder


def wait_until_stopped(folder: RunFolder, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until no process works on the run."""
    while is_going_on(folder):
        sleep(LOOK_S)
    with suppress(OSError):
        folder.stop_asked.unlink(missing_ok=True)


def saved_by(folder: RunFolder) -> SavedJobs:
    """What the jobs of a stopped run will continue from."""
    events = list(folder.events())
    live = LiveState()
    for event in events:
        live.observe(event)
    unsaved = unsaved_jobs(events)
    saved: list[str] = []
    own: list[str] = []
    for line in live.jobs.values():
        if line.phase is not JobPhase.PAUSED or line.job.id in unsaved:
            continue
        if kept_checkpoint(folder, line) is None:
            own.append(line.job.id)
        else:
            saved.append(f"{line.job.id} (epoch {line.epoch})")
    return SavedJobs(saved=tuple(saved), unsaved=tuple(unsaved), own=tuple(own))


def unsaved_jobs(events: Iterable[Event]) -> list[str]:
    """Jobs of a stopped run that did not save when they last had to leave."""
    unsaved: dict[str, None] = {}
    for event in events:
        match event:
            case JobNoted() if event.about is NoteKind.NOT_SAVED:
                unsaved[event.job_id] = None
            case JobFinished() | JobFailed():
                unsaved.pop(event.job_id, None)
            case Decided():
                for instruction in event.instructions:
                    unsaved.pop(instruction.job_id, None)
            case RunResumed():
                unsaved.clear()
            case _:
                pass
    return list(unsaved)


def _controller(folder: RunFolder) -> Holder | None:
    """The process that works on a run; None if none does. InputError if it cannot be reached from here."""
    where, host = str(folder.path), socket.gethostname()
    holder = holder_of(folder.lock)
    if holder is not None and holder.host != host:
        raise InputError(
            f"process {holder.pid} on {holder.host} works on it; this machine is {host}.",
            where=where,
            remedy=f"Run `stretto stop` on {holder.host}.",
        )
    pids = _with_open(folder.lock)
    if holder is not None and holder.pid in pids:
        return holder
    if holder is None and len(pids) == 1:  # version 0.1 does not write down its pid
        return Holder(pid=pids[0], since_s=0.0, command="", host=host)
    if not is_going_on(folder):
        return None
    raise InputError(
        "the process that works on it is not visible here: it has another user or container.",
        where=where,
        remedy="Stop it where it was started.",
    )


def _with_open(path: Path) -> list[int]:
    """The visible processes that have a file open."""
    try:
        wanted = path.stat()
    except OSError:
        return []
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                links = list((process / "fd").iterdir())
            except OSError:
                continue
            for link in links:
                with suppress(OSError):
                    if os.path.samestat(wanted, link.stat()):
                        found.append(int(process.name))
                        break
    return sorted(found)


def _token(holder: Holder) -> bytes:
    return f'{{"pid": {holder.pid}, "since_s": {holder.since_s!r}}}\n'.encode()


def _was_asked(folder: RunFolder, holder: Holder) -> bool:
    try:
        found = read_json(folder.stop_asked)
    except (OSError, UnreadableError):
        return False
    return bool(found == {"pid": holder.pid, "since_s": holder.since_s})


def what_was_saved(folder: RunFolder) -> str:
    """What the jobs saved, in words; empty if nothing ran."""
    try:
        found = saved_by(folder)
    except (JournalError, KeyError, TypeError, ValueError) as error:
        return f"it is not known what was saved: {error}"
    parts = []
    if found.saved:
        parts.append(f"saved: {several(found.saved)}")
    if found.unsaved:
        parts.append(f"did not save: {several(found.unsaved)}")
    if found.own:
        parts.append(f"with their commands' own checkpoints, if any: {several(found.own)}")
    return "; ".join(parts)


_JOURNAL = b"SQLite format 3\0"


def check_removable(folder: RunFolder) -> None:
    """Refuse to remove a folder that is no run, a run in use, or a run whose rented nodes may be up."""
    path = folder.path
    if path.is_symlink():
        raise InputError(
            f"is a link to {path.resolve()}, and links are not followed.",
            where=str(path),
            remedy=f"Remove the link with `rm {path}`, or name the folder itself.",
        )
    if not _is_surely_a_run(path):
        raise InputError(
            "may not be the folder of a run: it has neither a spec.json of ours nor a journal.",
            where=str(path),
            remedy="Look at what is in it, and remove it by hand.",
        )
    check_free(folder)
    _check_jobs_ended(folder)
    if up := sorted(one.stem for one in folder.nodes.glob("*.json")):
        raise InputError(
            f"{', '.join(up)} may still be up and cost money, and only this folder has their names.",
            where=str(folder.nodes),
            remedy="Start the run's command again, which releases what it does not need; or end them by "
            "hand and remove these files.",
        )


def remove_run(folder: RunFolder) -> None:
    """Remove everything in the folder, without following links.

    The files that mark a run go last, so that a kill leaves a folder that can be removed again. The id goes
    just before them: as long as it exists, no other run of that name can take the place in the store.
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
                f"could not be removed completely: {error.filename or folder.path}: {error.strerror}.",
                where=str(folder.path),
                remedy="Check that nothing writes there and that you may remove it, then repeat the "
                "command: what is left still counts as a run.",
            ) from error
    # `holding` removes the lock and the empty folder.


def _check_jobs_ended(folder: RunFolder) -> None:
    """Refuse while job processes of a killed controller are still saving."""
    locks = [*sorted((folder.path / "jobs").glob("*/lock")), folder.path / "lock"]
    held = [lock for lock in locks if is_held(lock)]
    if not held:
        return
    jobs = [lock.parent.name for lock in held if lock.parent != folder.path]
    raise InputError(
        f"processes of {several(jobs) if jobs else 'its jobs'} are still ending, and write there.",
        where=str(folder.path),
        remedy="Wait until they have ended, then repeat the command.",
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_surely_a_run(path: Path) -> bool:
    """Judge by the content of the files, not by their names."""
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
    """Whether it is a lock of ours: one that names its holder, or an empty one of version 0.1."""
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
