"""Reads training runs of the AlgoPerf leaderboards: a folder with runs.csv.gz and curves/WORKLOAD.csv.gz.

Runs were measured at intervals of time. Each is put on a common grid of steps, where a measurement counts
until the next one. A run ended at its target, at its time limit, or was broken off. Most were meant to last
for the step hint of the workload. If few come that far, the grid ends earlier: where the number of runs kept
times the number of steps is largest.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.core.errors import InputError, did_you_mean
from stretto.core.job import Value
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.worlds.csv_table import CsvRow, CsvTable, read_table
from stretto.worlds.curve_csv import metric_value
from stretto.worlds.curves import CurveTable, Floats, make_table

EPOCHS = 50
"""Default number of grid points."""
MOST_EPOCHS = 10_000
SLACK = 0.05
"""A run that ends within this share before the end of the grid keeps its last value until there."""
ODD = 10.0
"""If the steps of a run took this many times as long as usual, it counted something else as steps."""

DIRECTIONS = {
    "accuracy": Direction.MAX,
    "bleu": Direction.MAX,
    "mean_average_precision": Direction.MAX,
    "ssim": Direction.MAX,
    "loss": Direction.MIN,
    "wer": Direction.MIN,
}
SCHEDULE_NOTE = (
    "Most submissions shape their learning rate by the step hint: a curve that is cut short is not what "
    "a schedule made for fewer steps would have given."
)
RUN_COLUMNS = ("run_id", "submission", "workload", "metric", "val_target", "step_hint", "hparams_json")
"""Columns of runs.csv.gz; others are ignored."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    row: CsvRow
    steps: Floats
    train_s: Floats
    values: Floats

    @property
    def end(self) -> float:
        """The last step of the run; infinite if it diverged."""
        return math.inf if math.isnan(self.values[-1]) else float(self.steps[-1])

    def on(self, grid: Floats) -> Floats:
        """For each grid point, the last value measured by then."""
        found: Floats = self.values[np.searchsorted(self.steps, grid, side="right") - 1]
        return found

    def step_s(self) -> float:
        return float(self.train_s[-1] / self.steps[-1])


def read_algoperf(folder: Path, workload: str, epochs: int = EPOCHS) -> CurveTable:
    """Reads the validation curves of all runs that come far enough; an epoch is one interval of the grid."""
    if not 1 <= epochs <= MOST_EPOCHS:
        raise InputError(f"{epochs} epochs.", where=str(folder), remedy=f"Give 1 to {MOST_EPOCHS}.")
    described = _described(folder, workload)
    metric, direction = _metric(described)
    measured = _measured(folder / "curves" / f"{workload}.csv.gz", described, metric)
    usual_s = float(np.median([run.step_s() for run in measured]))
    runs = [run for run in measured if run.step_s() <= ODD * usual_s]
    hint = Counter(run.row.positive("step_hint") for run in runs).most_common(1)[0][0]
    horizon = _horizon(runs, hint)
    grid = horizon * np.arange(1, epochs + 1) / epochs
    long_enough = [run for run in runs if _comes_far_enough(run, horizon)]
    kept = [run for run in long_enough if run.steps[0] <= grid[0]]
    if not kept:
        raise InputError(
            f"no run of {workload} has a measurement in the first of {epochs} epochs.",
            where=str(folder),
            remedy="Ask for fewer epochs.",
        )
    ended = [run for run in runs if not _comes_far_enough(run, horizon)]
    began_late, odd = len(long_enough) - len(kept), len(measured) - len(runs)
    return make_table(
        name=workload,
        metric=metric,
        direction=direction,
        hyperparameters=[_config(run.row) for run in kept],
        values=np.array([run.on(grid) for run in kept]),
        epoch_s=[run.step_s() * horizon / epochs for run in kept],
        notes=[*_grid_notes(kept, horizon, hint), *_left_out_notes(ended, began_late, odd, direction)],
    )


def _described(folder: Path, workload: str) -> list[CsvRow]:
    table = _with_columns(read_table(folder / "runs.csv.gz"), RUN_COLUMNS)
    rows = [row for row in table.rows if row.cells["workload"] == workload]
    if not rows:
        there = sorted({row.cells["workload"] for row in table.rows})
        raise InputError(
            f"there is no workload {workload!r}.",
            where=str(table.path),
            remedy=f"{did_you_mean(workload, there)}There are {', '.join(there)[:400]}.",
        )
    return rows


def _metric(rows: Sequence[CsvRow]) -> tuple[str, Direction]:
    metric = rows[0].text("metric")
    for row in rows:
        if row.cells["metric"] != metric or metric not in DIRECTIONS:
            raise InputError(
                f"metric {row.cells['metric']!r} of a workload measured by {metric!r}.",
                where=row.where,
                remedy=f"Give all its runs one of {', '.join(DIRECTIONS)}.",
            )
    return metric, DIRECTIONS[metric]


def _measured(path: Path, described: Sequence[CsvRow], metric: str) -> list[_Run]:
    """Every run with its measurements in order of steps."""
    column = f"val_{metric}"
    table = _with_columns(read_table(path), ("run_id", "global_step", "train_time_s", column))
    points: dict[str, dict[float, tuple[float, float]]] = defaultdict(dict)
    for row in table.rows:
        measured = (row.number("train_time_s"), metric_value(row, column))
        points[row.cells["run_id"]][row.positive("global_step")] = measured
    runs = []
    for row in described:
        of_run = points.get(row.text("run_id"))
        if of_run is None:
            raise InputError(
                f"run {row.cells['run_id']} has no line in {path}.",
                where=row.where,
                remedy="Take the run out, or fetch its curve.",
            )
        steps = sorted(of_run)
        train_s, values = np.array([of_run[step] for step in steps]).T
        if train_s[-1] <= 0:
            raise InputError(
                f"run {row.cells['run_id']} took no training time.",
                where=str(path),
                remedy="Correct its train_time_s.",
            )
        runs.append(_Run(row, np.array(steps), train_s, values))
    return runs


def _with_columns(table: CsvTable, needed: Sequence[str]) -> CsvTable:
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}.",
            where=f"{table.path}:1",
            remedy=f"The header must have {','.join(needed)}.",
        )
    return table


def _comes_far_enough(run: _Run, horizon: float) -> bool:
    return run.end >= (1.0 - SLACK) * horizon


def _horizon(runs: Sequence[_Run], hint: float) -> float:
    """The number of steps, at most the hint, at which runs kept times steps is largest."""
    candidates = {hint, *(min(run.end, hint) for run in runs)}
    return max(
        candidates,
        key=lambda steps: (steps * sum(_comes_far_enough(run, steps) for run in runs), steps),
    )


def _config(row: CsvRow) -> Config:
    """The settings of the submission; a setting that is not a plain value becomes JSON text."""
    try:
        settings = json.loads(row.cells["hparams_json"] or "{}")
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(
            "hparams_json is not a JSON object.",
            where=row.where,
            remedy="Correct the hparams_json of this row.",
        )
    plain = ((name, _plain(value)) for name, value in settings.items())
    return (("run", row.text("run_id")), ("submission", row.text("submission")), *plain)


def _plain(value: object) -> Value:
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return json.dumps(value)


def _grid_notes(kept: Sequence[_Run], horizon: float, hint: float) -> list[str]:
    notes = [SCHEDULE_NOTE]
    if horizon < hint:
        notes.append(
            f"The curves end at {horizon:,.0f} of {hint:,.0f} steps, which keeps the most data of all runs."
        )
    hints = Counter(run.row.positive("step_hint") for run in kept)
    if len(hints) > 1:
        others = ", ".join(f"{count} for {steps:,.0f}" for steps, count in hints.items() if steps != hint)
        notes.append(f"Of {len(kept)} runs some were meant for another number of steps: {others}.")
    return notes


def _left_out_notes(ended: Sequence[_Run], began_late: int, odd: int, direction: Direction) -> list[str]:
    notes = []
    if ended:
        reached = sum(_reached(run, direction) for run in ended)
        notes.append(
            f"Left out: {len(ended)} runs that end more than {SLACK:.0%} earlier, {reached} at their target "
            f"and {len(ended) - reached} out of time or broken off."
        )
    if began_late:
        notes.append(f"Left out: {began_late} runs without a measurement in the first epoch.")
    if odd:
        notes.append(f"Left out: {odd} runs whose steps take over {ODD:g} times as long as most.")
    return notes


def _reached(run: _Run, direction: Direction) -> bool:
    target = run.row.number("val_target", at_least=-math.inf)
    turned = run.values if direction is Direction.MAX else -run.values
    return bool((turned >= (target if direction is Direction.MAX else -target)).any())
