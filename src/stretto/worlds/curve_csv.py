"""Reads learning curves from a CSV file: a line for every epoch of every trial.

    trial,epoch,value,lr,epoch_s
    a,1,0.31,0.1,35.2
    a,2,0.44,0.1,34.8

`trial` (or `row`), `epoch` (1, 2, ..) and `value` are required; an empty value or NaN means that the
trial diverged. `epoch_s` is how long the epoch took. Every other column is a hyperparameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stretto.core.errors import InputError
from stretto.core.job import Value
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.worlds.csv_table import CsvRow, CsvTable, read_table
from stretto.worlds.curves import ROW, CurveTable, make_table, schedule_notes

ID_COLUMNS = ("trial", ROW)
KNOWN = (*ID_COLUMNS, "epoch", "value", "epoch_s")
NOT_FINITE = {"", "nan", "inf", "+inf", "-inf", "infinity", "-infinity", "null", "none"}
"""Texts for a metric that is not a number, in lower case."""


def read_curve_csv(path: Path, direction: Direction) -> CurveTable:
    """Reads the curves of a CSV file; `direction` says which values are better."""
    table = read_table(path)
    id_column = _id_column(table)
    names = tuple(column for column in table.columns if column not in KNOWN)
    timed = "epoch_s" in table.columns
    trials: dict[str, _Trial] = {}
    for row in table.rows:
        trial_id = row.text(id_column)
        config = tuple((name, _hyperparameter(row, name)) for name in names)
        trial = trials.setdefault(trial_id, _Trial(trial_id, row, config))
        trial.add(row, config, timed=timed)
    epochs = max(len(trial.values) for trial in trials.values())
    values = np.array([trial.padded(epochs) for trial in trials.values()])
    return make_table(
        name=path.name.removesuffix(".gz").removesuffix(".csv"),
        metric="value",
        direction=direction,
        hyperparameters=[
            (*((("trial", trial.id),) if id_column == "trial" else ()), *trial.config)
            for trial in trials.values()
        ],
        values=values,
        epoch_s=[float(np.mean(trial.times_s)) for trial in trials.values()] if timed else None,
        notes=schedule_notes(names, epochs),
    )


def metric_value(row: CsvRow, column: str) -> float:
    """A metric; NaN for the texts that mean not a number."""
    if row.cells[column].lower() in NOT_FINITE:
        return math.nan
    return row.number(column, at_least=-math.inf)


@dataclass(slots=True)
class _Trial:
    id: str
    first: CsvRow
    config: Config
    values: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def add(self, row: CsvRow, config: Config, *, timed: bool) -> None:
        epoch = row.whole("epoch")
        due = len(self.values) + 1
        if epoch != due:
            raise InputError(
                f"epoch {epoch} of trial {self.id!r} comes where epoch {due} is due.",
                where=row.where,
                remedy="Give each trial's epochs once each and in order: 1, 2, 3, ..",
            )
        for (name, before), (_, now) in zip(self.config, config, strict=True):
            if before != now:
                raise InputError(
                    f"{name} of trial {self.id!r} is {now!r} here and {before!r} in line {self.first.line}.",
                    where=row.where,
                    remedy="A trial keeps its hyperparameters.",
                )
        self.values.append(metric_value(row, "value"))
        if timed:
            self.times_s.append(row.positive("epoch_s"))

    def padded(self, epochs: int) -> list[float]:
        """All values; a trial may end early only if it diverged."""
        missing = epochs - len(self.values)
        if missing and not any(map(math.isnan, self.values)):
            raise InputError(
                f"trial {self.id!r} ends after epoch {len(self.values)}, and the longest after {epochs}.",
                where=self.first.where,
                remedy="Give all trials equally many epochs; only one that diverged (NaN) may end early.",
            )
        return self.values + [math.nan] * missing


def _id_column(table: CsvTable) -> str:
    found = [column for column in ID_COLUMNS if column in table.columns]
    missing = [column for column in ("epoch", "value") if column not in table.columns]
    if len(found) == 1 and not missing and all(table.columns):
        return found[0]
    problem = f"no column {missing[0]}" if missing else "a column without a name"
    if len(found) != 1:
        problem = "both a column trial and a column row" if found else "no column trial"
    raise InputError(
        f"{problem}.",
        where=f"{table.path}:1",
        remedy="The header is trial,epoch,value, then epoch_s if known and any hyperparameters.",
    )


def _hyperparameter(row: CsvRow, name: str) -> Value:
    """A number where the cell is one, else its text."""
    text = row.text(name)
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return row.number(name)
    return int(number) if text.lstrip("+-").isdecimal() and abs(number) < 2**53 else number
