"""Turns CSV traces into jobs: workload files, and cluster logs in the Philly format, with these columns.

    workload   name,time,application,num_replicas,batch_size       time in seconds
    log        timestamp,duration,num_gpus,gpu_time,cluster        durations in seconds and GPU seconds

A log says when jobs came and how much GPU time they took, not what they trained. So each row draws an
application of its class of GPU time, and one of its tuned requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from stretto.core.errors import InputError
from stretto.core.job import Job
from stretto.worlds.applications import Applications, Configuration
from stretto.worlds.csv_table import CsvRow, CsvTable, read_table
from stretto.worlds.truth import Truth, Workload, make_workload

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def read_workload(path: Path, applications: Applications) -> Workload:
    """Reads the jobs of a workload file; their truth comes from `applications`."""
    return workload_of(read_table(path), applications)


def workload_of(table: CsvTable, applications: Applications) -> Workload:
    """The same, from a table."""
    line_of: dict[str, int] = {}
    known = []
    for row in table.require(COLUMNS).rows:
        name = row.text("name")
        if name in line_of:
            raise InputError(
                f"name {name!r} is already that of the job in line {line_of[name]}.",
                where=row.where,
                remedy="Give every job a name of its own.",
            )
        line_of[name] = row.line
        request = Configuration(row.whole("num_replicas"), row.whole("batch_size"))
        application = applications.get(row.text("application"), where=row.where)
        job = application.job(name, row.number("time"), request, where=row.where)
        known.append((job, application.truth))
    return make_workload(table.path.stem, known)


LOG_COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")

CLASSES = (
    (1.0, ("cifar10", "ncf")),
    (10.0, ("deepspeech2", "bert")),
    (100.0, ("yolov3",)),
    (math.inf, ("imagenet",)),
)
"""Upper bound of each class in GPU-hours, and its applications, all equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which rows of a log become jobs."""

    start_s: float = 0.0
    """The window starts this long after the first row .."""
    hours: float = math.inf
    """.. and lasts this long."""
    max_jobs: int | None = None
    """If there are more, this many are drawn at random."""
    min_duration_s: float = 60.0
    """Shorter jobs are left out."""
    max_gpu_hours: float = 1000.0
    """Jobs of this size or more are left out."""

    def __post_init__(self) -> None:
        self._check("start_s", self.start_s, self.start_s >= 0, "0 or more seconds")
        self._check("hours", self.hours, self.hours > 0, "more than 0 hours")
        self._check("max_jobs", self.max_jobs, self.max_jobs is None or self.max_jobs >= 1, "1 job or more")
        self._check("min_duration_s", self.min_duration_s, self.min_duration_s >= 0, "0 or more seconds")
        self._check("max_gpu_hours", self.max_gpu_hours, self.max_gpu_hours > 0, "more than 0 GPU-hours")

    @staticmethod
    def _check(name: str, value: float | None, good: bool, rule: str) -> None:
        if not good:
            raise InputError(f"{name} is {value}.", remedy=f"Give {rule}.")


def workload_of_log(
    table: CsvTable, applications: Applications, rng: np.random.Generator, *, keep: LogFilter
) -> Workload:
    """Makes jobs from a log. Its notes count the rows left out; times count from the first job kept."""
    entries = sorted((_entry(row) for row in table.require(LOG_COLUMNS).rows), key=lambda entry: entry.at_s)
    kept, notes = _filter(entries, keep, rng)
    if not kept:
        span_h = (entries[-1].at_s - entries[0].at_s) / 3600.0
        raise InputError(
            f"no job is left. {' '.join(notes)}",
            where=str(table.path),
            remedy=f"Widen the time window or the limits; the log spans {span_h:.1f} hours "
            f"from {entries[0].row.text('timestamp')}.",
        )
    jobs = [_job(index, entry, kept[0].at_s, applications, rng) for index, entry in enumerate(kept)]
    drawn = "The log does not say what was trained: applications and requests are drawn by class of GPU time."
    return make_workload(table.path.name.removesuffix(".gz").removesuffix(".csv"), jobs, (*notes, drawn))


@dataclass(frozen=True, slots=True)
class _Entry:
    row: CsvRow
    at_s: float
    duration_s: float
    gpu_h: float


def _entry(row: CsvRow) -> _Entry:
    row.whole("num_gpus")
    return _Entry(row, _timestamp_s(row), row.number("duration"), row.number("gpu_time") / 3600.0)


def _timestamp_s(row: CsvRow) -> float:
    text = row.text("timestamp")
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError as error:
        raise InputError(
            f"timestamp {text[:40]!r} is not a date and time.",
            where=row.where,
            remedy="Write it as in 2017-10-09 07:01:55.",
        ) from error
    return moment.timestamp()


def _filter(
    entries: Sequence[_Entry], keep: LogFilter, rng: np.random.Generator
) -> tuple[list[_Entry], tuple[str, ...]]:
    """The entries that are kept, and notes on how many are not and why."""
    begin_s = entries[0].at_s + keep.start_s
    end_s = begin_s + 3600.0 * keep.hours
    window = [entry for entry in entries if begin_s <= entry.at_s < end_s]
    lasting = [entry for entry in window if entry.duration_s >= keep.min_duration_s]
    small = [entry for entry in lasting if entry.gpu_h < keep.max_gpu_hours]
    drawn = small
    if keep.max_jobs is not None and len(small) > keep.max_jobs:
        drawn = [small[i] for i in sorted(rng.choice(len(small), size=keep.max_jobs, replace=False))]
    left_out = (
        (len(entries) - len(window), "outside the time window"),
        (len(window) - len(lasting), f"shorter than {keep.min_duration_s:g} s"),
        (len(lasting) - len(small), f"of {keep.max_gpu_hours:g} GPU-hours or more"),
        (len(small) - len(drawn), f"not among the {keep.max_jobs} drawn"),
    )
    return drawn, tuple(
        f"{count} of {len(entries)} rows left out: {why}." for count, why in left_out if count
    )


def _job(
    index: int, entry: _Entry, start_s: float, applications: Applications, rng: np.random.Generator
) -> tuple[Job, Truth]:
    names = next(names for below_h, names in CLASSES if entry.gpu_h < below_h)
    name = names[rng.integers(len(names))]
    application = applications.get(name, where=entry.row.where)
    request = application.tuned[rng.integers(len(application.tuned))]
    job = application.job(f"{name}-{index}", entry.at_s - start_s, request, where=entry.row.where)
    return job, application.truth


def load_workload(
    path: Path,
    applications: Applications,
    rng: np.random.Generator,
    *,
    keep: LogFilter | None = None,
) -> Workload:
    """Reads jobs from a workload file or a cluster log; the header decides which it is.

    `rng` draws what a log does not say, and `keep` chooses rows of a log; a workload file needs neither.
    """
    table = read_table(path)
    if set(LOG_COLUMNS) <= set(table.columns):
        return workload_of_log(table, applications, rng, keep=keep or LogFilter())
    if keep is not None:
        raise InputError(
            "rows can be chosen from a cluster log only, and this is none.",
            where=f"{path}:1",
            remedy=f"Leave the choice out, or give a file with the header {','.join(LOG_COLUMNS)}.",
        )
    if not set(COLUMNS) & set(table.columns):
        raise InputError(
            "the header is neither that of a workload nor that of a cluster log.",
            where=f"{path}:1",
            remedy=f"Use {','.join(COLUMNS)} or {','.join(LOG_COLUMNS)}.",
        )
    return workload_of(table, applications)
