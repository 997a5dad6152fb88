"""Truth from measured tables: step times by placement, training runs by batch size.

A profile is a folder per application with three kinds of files:

    placements.csv          placement,local_bsz,step_time,sync_time
    scalability.csv         num_nodes,num_replicas,local_bsz,step_time,sync_time
    validation-<batch>.csv  progress,iteration,metric,grad_sqr,grad_var      one row per epoch

A placement is written as the GPUs on each node ("422"); times are seconds; progress is cumulative
statistical units. Between measured points everything is linear; beyond them nothing is known.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stretto.core.allocation import Allocation, Tasks
from stretto.core.errors import InputError
from stretto.core.observations import NoiseSample
from stretto.models.speed import Floats
from stretto.worlds.applications import Application, Applications, builtin_catalogue
from stretto.worlds.csv_table import CsvRow, read_table
from stretto.worlds.truth import StepTime, by_epoch

Integers = npt.NDArray[np.int64]


class LinearBetween:
    """Interpolates linearly in a Delaunay triangulation of points with whole coordinates.

    Whole coordinates make volumes exact, so a point on the border is inside. If two neighbouring tetrahedra
    cut a face differently, the first one counts. Volumes are cross products: scipy's interpolator calls
    LAPACK for each tetrahedron, which takes many seconds with a threaded BLAS on a busy machine.
    """

    def __init__(self, points: Integers, values: Floats) -> None:
        from scipy.spatial import Delaunay  # noqa: PLC0415  (slow to import)

        simplices = Delaunay(points).simplices
        corners = points[simplices]
        base = corners[:, 3]
        a, b, c = (corners[:, i] - base for i in range(3))
        faces = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=1)
        volume = np.einsum("si,si->s", a, faces[:, 0])
        solid = volume != 0
        self._base = base[solid]
        self._faces = faces[solid] * np.sign(volume[solid])[:, None, None]
        self._volume = np.abs(volume[solid])
        self._values = values[simplices[solid]]

    def at(self, point: Integers) -> Floats | None:
        """The values at a point; None outside the convex hull."""
        shares = np.einsum("sfi,si->sf", self._faces, point - self._base)
        rest = self._volume - shares.sum(axis=1)
        inside = np.flatnonzero((shares >= 0).all(axis=1) & (rest >= 0))
        if not inside.size:
            return None
        first = inside[0]
        weights = np.append(shares[first], rest[first]) / self._volume[first]
        return np.asarray(weights @ self._values[first], dtype=float)


Shape = tuple[int, ...]
"""GPUs on each node used."""

FARTHEST_NODES = 16
"""The most nodes that were measured. On more nodes a job counts as being on this many."""


class OutsideProfileError(InputError):
    """A simulation needs a value that was not measured."""


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """A measured step; `nodes` and `workers` follow from the shape of a placement."""

    nodes: int
    workers: int
    atomic: int
    time: StepTime


def normal_shape(shape: Shape) -> Shape:
    """The lexicographically smallest rotation: how placements are written in the tables."""
    return min(shape[i:] + shape[:i] for i in range(len(shape)))


class SpeedTable:
    """Step times of one application on one GPU type; `placements` by normal shape and batch per GPU."""

    def __init__(
        self,
        application: str,
        placements: Mapping[Shape, Mapping[int, StepTime]],
        scalability: Sequence[SpeedPoint],
    ) -> None:
        self._application = application
        self._placements = {
            shape: (
                np.array(sorted(times), dtype=float),
                np.array([times[atomic] for atomic in sorted(times)]),
            )
            for shape, times in placements.items()
        }
        self._scalability = tuple(scalability)

    @property
    def atomic_range(self) -> tuple[int, int]:
        """Smallest and largest batch per GPU measured for any placement."""
        measured = np.concatenate([atomics for atomics, _ in self._placements.values()])
        return int(measured.min()), int(measured.max())

    def step_time(self, shape: Shape, atomic: int) -> StepTime:
        """Linear in the batch per GPU for a measured placement, else between the nearest measured points."""
        known = self._placements.get(normal_shape(shape))
        if known is None:
            return self._interpolate(shape, atomic)
        atomics, times = known
        if not atomics[0] <= atomic <= atomics[-1]:
            raise self._unknown(shape, atomic, f"measured for {atomics[0]:g} to {atomics[-1]:g} per GPU")
        return StepTime(*(float(np.interp(atomic, atomics, times[:, i])) for i in (0, 1)))

    @cached_property
    def _between(self) -> LinearBetween | None:
        """Over (nodes, workers, batch per GPU); None if the measurements span no volume."""
        points = [*self._mean_of_placements(), *self._scalability]
        places = np.array([(point.nodes, point.workers, point.atomic) for point in points], dtype=np.int64)
        if np.linalg.matrix_rank(places - places[0]) < 3:
            return None
        return LinearBetween(places, np.array([point.time for point in points]))

    def _interpolate(self, shape: Shape, atomic: int) -> StepTime:
        place = np.array([min(len(shape), FARTHEST_NODES), sum(shape), atomic])
        times = self._between.at(place) if self._between else None
        if times is None:
            raise self._unknown(shape, atomic, "no measurements around it")
        return StepTime(*(float(time) for time in times))

    def _mean_of_placements(self) -> list[SpeedPoint]:
        groups: dict[tuple[int, int, int], list[Floats]] = defaultdict(list)
        for shape, (atomics, times) in self._placements.items():
            for atomic, time in zip(atomics, times, strict=True):
                groups[len(shape), sum(shape), int(atomic)].append(time)
        return [SpeedPoint(*key, StepTime(*np.mean(group, axis=0))) for key, group in sorted(groups.items())]

    def _unknown(self, shape: Shape, atomic: int, measured: str) -> OutsideProfileError:
        low, high = self.atomic_range
        return OutsideProfileError(
            f"the profile of {self._application} does not tell the step time on {'+'.join(map(str, shape))} "
            f"GPUs with {atomic} examples each: {measured}.",
            remedy=f"Use nodes like those that were measured and {low} to {high} examples per GPU, "
            "or the built-in applications, which any cluster can run.",
        )


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run at a fixed total batch size, with one value per epoch."""

    batch: int
    progress: tuple[float, ...]
    metric: tuple[float, ...]
    grad_sqr: tuple[float, ...]
    grad_var: tuple[float, ...]


class TableTruth:
    """The truth as measured tables, with a cache. Jobs of one application share it."""

    def __init__(self, application: str, speed: SpeedTable, runs: Sequence[TrainingRun]) -> None:
        self._application = application
        self._speed = speed
        self._runs = tuple(sorted(runs, key=lambda run: run.batch))
        self._batches = [run.batch for run in self._runs]
        per_epoch = zip(*(run.progress for run in self._runs), strict=False)  # ends with the shortest run
        self._units = (0.0, *(min(progress) for progress in per_epoch))
        self._losses = falling(self._runs[0].metric)
        self._times: dict[tuple[Tasks, int], StepTime] = {}
        self._times_by_shape: dict[tuple[Shape, int], StepTime] = {}
        self._noise: dict[tuple[int, int], NoiseSample] = {}

    @property
    def epochs(self) -> int:
        return len(self._units) - 1

    @property
    def batch_range(self) -> tuple[int, int]:
        """Smallest and largest total batch size trained with."""
        return self._batches[0], self._batches[-1]

    def units_at(self, epoch: int) -> float:
        """The smallest progress over all batch sizes, which every run has reached."""
        return by_epoch(self._units, epoch)

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        key = (allocation.workers, atomic)
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = self._time_of_shape(allocation.shape, atomic)
        return known

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample:
        """Linear in the batch size between the two nearest runs."""
        known = self._noise.get((total_batch, epoch))
        if known is None:
            known = self._noise[total_batch, epoch] = self._interpolate_noise(total_batch, epoch)
        return known

    def loss_at(self, epoch: int) -> float | None:
        """The metric of the run at the smallest batch, as a loss."""
        return by_epoch(self._losses, epoch, first=1)

    def _time_of_shape(self, shape: Shape, atomic: int) -> StepTime:
        known = self._times_by_shape.get((shape, atomic))
        if known is None:
            known = self._times_by_shape[shape, atomic] = self._speed.step_time(shape, atomic)
        return known

    def _interpolate_noise(self, total_batch: int, epoch: int) -> NoiseSample:
        low, high = self.batch_range
        if not low <= total_batch <= high:
            raise OutsideProfileError(
                f"the profile of {self._application} has no training at batch size {total_batch}, "
                f"only from {low} to {high}.",
                remedy="Keep total batch sizes in this range.",
            )
        above = bisect_left(self._batches, total_batch)
        upper, lower = self._runs[above], self._runs[max(above - 1, 0)]
        share = (total_batch - lower.batch) / (upper.batch - lower.batch) if upper is not lower else 0.0
        sqr, var = (
            by_epoch(low_values, epoch) * (1.0 - share) + by_epoch(high_values, epoch) * share
            for low_values, high_values in (
                (lower.grad_sqr, upper.grad_sqr),
                (lower.grad_var, upper.grad_var),
            )
        )
        return NoiseSample(sqr=sqr, var=var)


def falling(metric: Sequence[float]) -> tuple[float, ...]:
    """A metric as a loss: for one that rises, such as accuracy, its distance from 1 or 100 %."""
    if metric[-1] <= metric[0]:
        return tuple(metric)
    best = 1.0 if max(metric) <= 1.0 else 100.0
    return tuple(best - value for value in metric)


_PLACEMENT = ("placement", "local_bsz", "step_time", "sync_time")
_SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
_VALIDATION = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
_VALIDATION_FILE = re.compile(r"validation-(\d{1,9})\.csv", re.ASCII)
_PER_GPU_CAP = {"yolov3": 8}
"""Largest usable batch per GPU where the tables have larger ones."""


def load_profiles(folders: Sequence[Path], gpu_type: str | None = None) -> Applications:
    """Loads every application that has a folder in any of `folders`.

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
    """The placements, scalability and validation files, or a text with those that are missing."""
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


def _time(row: CsvRow) -> StepTime:
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
