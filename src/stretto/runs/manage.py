"""Runs as people ask for them: listing, stopping and removing."""

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
"""Measured only, or ended before it began."""
DAMAGED = "damaged"
STATES = {
    RunStatus.UNFINISHED: RUNNING,
    EndedBy.JOBS: FINISHED,
    EndedBy.DEADLINE: "deadline came",
    EndedBy.BUDGET: "budget spent",
}
"""What a status is called in a list; others are called as they are."""
MARKS = ("spec.json", "journal.sqlite", "journal.sqlite.lock", "profile.json", "failed.log")
"""Whoever has one of these is the folder of a run, whole or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run."""

    name: str
    path: Path
    kind: str
    """tune or run; empty if that is not known."""
    state: str
    """running, measuring, stopped, interrupted, finished, deadline came, budget spent, not begun, damaged."""
    best: str
    """Of a study its best value; of jobs how many of them are done."""
    best_metric: float | None
    age_s: float
    """Since its first start; of one that was not begun, since its folder last changed."""
    size_bytes: int
    command: str
    """The one that began it; empty if that is not known."""
    pid: int | None
    """Of the process that works on it."""
    problem: str = ""
    """What is wrong with its files."""


def list_runs(runs: Path = RUNS, *, now_s: float | None = None) -> tuple[RunInfo, ...]:
    """Every run in a folder, the newest first; whatever else lies there is passed over."""
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
    """Whether something of a run lies there."""
    if path.name.startswith("."):
        return False
    try:
        return path.is_dir() and any((path / mark).is_file() for mark in MARKS)
    except OSError:
        return False


def run_info(folder: RunFolder, now_s: float) -> RunInfo:
    """How a run stands; nothing that is wrong with its files is raised."""
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
    """Of everything in a folder; links are not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118 - there may be many
            except OSError:  # it was removed meanwhile
                continue


def find_folder(run: str, runs: Path = RUNS) -> RunFolder:
    """The folder of a run, begun, damaged or only measured for: a name under `runs`, or a path."""
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
    """The names of a run's jobs, as far as they are known: by its journal, and by their folders."""
    names: dict[str, None] = {}
    with suppress(JournalError, OSError):
        submitted = (event for event in folder.events() if isinstance(event, JobSubmitted))
        names.update((event.job.id, None) for event in submitted)
    with suppress(OSError):
        folders = (one.name for one in (folder.path / "jobs").iterdir() if one.is_dir())
        names.update(dict.fromkeys(sorted(folders)))
    return list(names)


SECOND_S = 0.5
"""Between two requests: signals that come at once are one."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJobs:
    """What the jobs of a run that stands still have saved."""

    saved: tuple[str, ...]
    """Jobs that go on from a checkpoint, with the epoch they came to."""
    unsaved: tuple[str, ...]
    """Jobs that were asked to save, and did not."""
    own: tuple[str, ...]
    """Jobs whose command keeps what it likes."""


def ask_to_stop(folder: RunFolder, *, at_once: bool) -> Holder | None:
    """Send the process of a running run what Ctrl-C sends, or twice that; says which process it is.

    None if the run has ended meanwhile. A second request without `at_once` is not sent: the run is stopping
    already.
    """
    holder = _controller(folder)
    if holder is None:
        return None
    asked = _was_asked(folder, holder)
    if not asked:
        with suppress(OSError):  # a full disk keeps no one from stopping
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
    """Until nobody works on the run any more."""
    while is_going_on(folder):
        sleep(LOOK_S)
    with suppress(OSError):
        folder.stop_asked.unlink(missing_ok=True)


def saved_by(folder: RunFolder) -> SavedJobs:
    """What a run that was stopped goes on from."""
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
    """Jobs of a run that stands still which had to leave, last of all, and did not save."""
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
    """The process that works on a run, None if none does any more.

    InputError if it cannot be told, or cannot be reached from here.
    """
    where, host = str(folder.path), socket.gethostname()
    holder = holder_of(folder.lock)
    if holder is not None and holder.host != host:
        raise InputError(
            f"process {holder.pid} on {holder.host} works on it, and this is {host}.",
            where=where,
            remedy=f"Run `stretto stop` on {holder.host}.",
        )
    pids = _with_open(folder.lock)
    if holder is not None and holder.pid in pids:
        return holder
    if holder is None and len(pids) == 1:  # of version 0.1, which does not write down who it is
        return Holder(pid=pids[0], since_s=0.0, command="", host=host)
    if not is_going_on(folder):
        return None
    raise InputError(
        "a process works on it that cannot be seen from here: another user's, or in another container.",
        where=where,
        remedy="Stop it where it was started.",
    )


def _with_open(path: Path) -> list[int]:
    """The processes that have a file open, as far as this user may know."""
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
    """In words; empty where nothing ran."""
    try:
        found = saved_by(folder)
    except (JournalError, KeyError, TypeError, ValueError) as error:
        return f"what it saved cannot be told: {error}"
    parts = []
    if found.saved:
        parts.append(f"saved: {several(found.saved)}")
    if found.unsaved:
        parts.append(f"did not save: {several(found.unsaved)}")
    if found.own:
        parts.append(f"without a checkpoint of ours, so as their commands saved: {several(found.own)}")
    return "; ".join(parts)


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
