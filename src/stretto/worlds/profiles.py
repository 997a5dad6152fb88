"""Reads folders of measured profiles into applications."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stretto.core.errors import InputError
from stretto.worlds.applications import Application, Applications
from stretto.worlds.catalogue import builtin_catalogue
from stretto.worlds.csv_table import Row, read_table
from stretto.worlds.tables import Shape, SpeedPoint, SpeedTable, TableTruth, TrainingRun, normal_shape
from stretto.worlds.truth import StepTime

_PLACEMENT = ("placement", "local_bsz", "step_time", "sync_time")
_SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
_VALIDATION = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
_VALIDATION_FILE = re.compile(r"validation-(\d{1,9})\.csv", re.ASCII)
_PER_GPU_CAP = {"yolov3": 8}
"""Measured beyond what training can use: larger batches per GPU exist in the tables only."""


def load_profiles(folders: Sequence[Path], gpu_type: str | None = None) -> Applications:
    """Every application with a folder in any of `folders`.

    Each file is taken from the first folder that has it (validation files: all from the first folder
    that has some). With a GPU type "rtx", step times come from placements-rtx.csv and scalability-rtx.csv.
    """
    source = " + ".join(str(folder) for folder in folders)
    entries: dict[str, Application] = {}
    left_out: dict[str, str] = {}
    for name in _application_names(folders):
        homes = [folder / name for folder in folders]
        files = _find(homes, gpu_type)
        if isinstance(files, str):
            left_out[name] = files
        else:
            entries[name] = _application(name, *files)
    if not entries:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise InputError(
            f"no application with a complete profile{f' ({why})' if why else ''}.",
            where=source,
            remedy="Give folders with <application>/placements.csv, scalability.csv, validation-<batch>.csv.",
        )
    return Applications(source, entries, left_out)


def _application_names(folders: Sequence[Path]) -> list[str]:
    names = set()
    for folder in folders:
        if not folder.is_dir():
            raise InputError("is not a folder.", where=str(folder), remedy="Give a folder of profiles.")
        names |= {home.name for home in folder.iterdir() if home.is_dir() and any(home.glob("*.csv"))}
    return sorted(names)


def _find(homes: Sequence[Path], gpu_type: str | None) -> tuple[Path, Path, list[Path]] | str:
    """The placements, scalability and validation files; or which are missing."""
    suffix = f"-{gpu_type}" if gpu_type else ""
    found = []
    for name in (f"placements{suffix}.csv", f"scalability{suffix}.csv"):
        path = next((home / name for home in homes if (home / name).is_file()), None)
        if path is None:
            return f"there is no {name}"
        found.append(path)
    for home in homes:
        runs = sorted(path for path in home.glob("validation-*.csv") if _VALIDATION_FILE.fullmatch(path.name))
        if runs:
            return found[0], found[1], runs
    return "there is no validation-<batch>.csv"


def _application(name: str, placements: Path, scalability: Path, validations: Sequence[Path]) -> Application:
    speed = SpeedTable(name, _read_placements(placements), _read_scalability(scalability))
    truth = TableTruth(name, speed, [_read_run(path) for path in validations])
    initial_batch, max_batch = truth.batch_range
    per_gpu_min, per_gpu_max = speed.atomic_range
    known = builtin_catalogue().entries.get(name)
    application = Application(
        name=name,
        truth=truth,
        initial_batch=initial_batch,
        max_batch=max_batch,
        per_gpu_min=per_gpu_min,
        per_gpu_max=min(per_gpu_max, _PER_GPU_CAP.get(name, per_gpu_max)),
    )
    if known is None:
        return application
    return replace(application, tier=known.tier, max_workers=known.max_workers, tuned=known.tuned)


def _read_placements(path: Path) -> dict[Shape, dict[int, StepTime]]:
    placements: dict[Shape, dict[int, StepTime]] = defaultdict(dict)
    for row in read_table(path).require(_PLACEMENT).rows:
        digits = row.text("placement")
        if not re.fullmatch("[1-9]+", digits):
            raise InputError(
                f"placement {digits!r} is not a row of digits 1 to 9.",
                where=row.where,
                remedy="Write the GPUs on each node, as in 422.",
            )
        times = placements[normal_shape(tuple(int(digit) for digit in digits))]
        atomic = row.whole("local_bsz")
        if atomic in times:
            raise InputError(
                f"placement {digits} (or a rotation of it) with local_bsz {atomic} appears twice.",
                where=row.where,
                remedy="Keep one row for each.",
            )
        times[atomic] = _time(row)
    return placements


def _read_scalability(path: Path) -> list[SpeedPoint]:
    return [
        SpeedPoint(row.whole("num_nodes"), row.whole("num_replicas"), row.whole("local_bsz"), _time(row))
        for row in read_table(path).require(_SCALABILITY).rows
    ]


def _time(row: Row) -> StepTime:
    time = StepTime(row.positive("step_time"), row.number("sync_time"))
    if time.sync_s > time.step_s:
        raise InputError(
            f"sync_time {time.sync_s:g} exceeds step_time {time.step_s:g}, which includes it.",
            where=row.where,
            remedy="Correct one of the two.",
        )
    return time


def _read_run(path: Path) -> TrainingRun:
    match = _VALIDATION_FILE.fullmatch(path.name)
    batch = int(match.group(1)) if match else 0
    if batch < 1:
        raise InputError("batch size 0.", where=str(path), remedy="Name the file validation-<batch>.csv.")
    rows = read_table(path).require(_VALIDATION).rows
    progress = tuple(row.positive("progress") for row in rows)
    for row, before, after in zip(rows[1:], progress, progress[1:], strict=False):
        if after <= before:
            raise InputError(
                f"progress {after:g} is not above that of the epoch before, {before:g}.",
                where=row.where,
                remedy="Progress is cumulative: it must grow.",
            )
    return TrainingRun(
        batch=batch,
        progress=progress,
        metric=tuple(row.number("metric", at_least=-float("inf")) for row in rows),
        grad_sqr=tuple(row.number("grad_sqr") for row in rows),
        grad_var=tuple(row.number("grad_var") for row in rows),
    )
