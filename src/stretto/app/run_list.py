"""The runs of a folder as people ask for them: which there are, where they stand and what they take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.app.real_board import Board, Phase
from stretto.app.real_drive import EndedBy
from stretto.app.real_result import begun_outline, ending_of
from stretto.app.real_standing import Standing, is_going_on, standing_of
from stretto.app.run_folder import RUNS, RunFolder, RunSpec, is_folder_name, no_such_run
from stretto.core.errors import InputError, JournalError, StrettoError
from stretto.core.events import JobSubmitted
from stretto.core.file_lock import holder_of

MEASURING = "measuring"
RUNNING = "running"
FINISHED = "finished"
NOT_BEGUN = "not begun"
"""Measured only, or ended before it began."""
DAMAGED = "damaged"
STATES = {
    Standing.GOING_ON: RUNNING,
    EndedBy.JOBS: FINISHED,
    EndedBy.DEADLINE: "deadline came",
    EndedBy.BUDGET: "budget spent",
}
"""What a standing is called in a list; others are called as they are."""
MARKS = ("spec.json", "journal.sqlite", "journal.sqlite.lock", "profile.json", "failed.log")
"""Whoever has one of these is the folder of a run, whole or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
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


def list_runs(runs: Path = RUNS, *, now_s: float | None = None) -> tuple[RunLine, ...]:
    """Every run in a folder, the newest first; whatever else lies there is passed over."""
    now_s = time.time() if now_s is None else now_s
    try:
        found = [run_line(RunFolder(path), now_s) for path in runs.iterdir() if is_run_folder(path)]
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


def run_line(folder: RunFolder, now_s: float) -> RunLine:
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
            state, best, best_metric = _standing(folder, spec)
            problem = folder.damage()
    except (StrettoError, OSError) as error:
        state, problem = RUNNING if going_on else DAMAGED, str(error)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        state = RUNNING if going_on else DAMAGED
        problem = f"{folder.path}: its journal is damaged ({error!r})."
    return RunLine(
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


def _standing(folder: RunFolder, spec: RunSpec) -> tuple[str, str, float | None]:
    """State, best in words, and the best value."""
    study = begun_outline(spec).study if spec.is_study else None
    board, last = Board(study), None
    for event in folder.events():
        board.observe(event)
        last = event
    standing = ending_of(folder) or standing_of(folder, last)
    state = STATES.get(standing, str(standing))
    if study is None:
        done = sum(line.phase is Phase.FINISHED for line in board.jobs.values())
        failed = sum(line.phase is Phase.FAILED for line in board.jobs.values())
        done_of = f"{done} of {len(spec.asked.get('works') or board.jobs)} done"
        return state, f"{done_of}, {failed} failed" if failed else done_of, None
    line = board.best()
    value = None if line is None else board.best_value(line)
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
