"""Learning curves: what a trial's metric is after each epoch, from a table or a formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stretto.core.errors import InputError
from stretto.search.space import Config
from stretto.search.study import Direction

Floats = npt.NDArray[np.float64]

ROW = "row"
"""The name under which a configuration says which row of a table it is."""


class Curves(Protocol):
    """Where a study's learning curves come from."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def metric(self) -> str:
        """What is measured after each epoch."""

    @property
    def direction(self) -> Direction:
        """Which way it is better."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know about these curves, in sentences."""

    @property
    def most_epochs(self) -> int | None:
        """How far they go; None: as far as anyone likes."""

    @property
    def configs(self) -> tuple[Config, ...] | None:
        """The only configurations there are; None: any will do."""

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:
        """The metric after each of the first `epochs` epochs, NaN once the trial has diverged."""

    def relative_time(self, config: Config) -> float | None:
        """Time of an epoch relative to the mean over configurations; None: not known."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CurveTable:
    """Curves that were measured: one row a training run."""

    name: str
    metric: str
    direction: Direction
    configs: tuple[Config, ...]
    """One for each row, which it names in its first pair: ("row", 0), ("row", 1), .."""
    values: Floats
    """The metric by row and epoch; NaN from the epoch on in which a run diverged."""
    epoch_s: Floats | None = None
    """Mean time of an epoch of each row, where it was measured."""
    notes: tuple[str, ...] = ()

    @property
    def most_epochs(self) -> int:
        return int(self.values.shape[1])

    @property
    def diverged(self) -> int:
        """Rows that end in NaN."""
        return int(np.isnan(self.values[:, -1]).sum())

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:  # noqa: ARG002
        """The row's values; nothing about them is random."""
        return tuple(self.values[self._row(config), :epochs].tolist())

    def relative_time(self, config: Config) -> float | None:
        if self.epoch_s is None:
            return None
        return float(self.epoch_s[self._row(config)] / self.epoch_s.mean())

    def _row(self, config: Config) -> int:
        row = next((value for name, value in config if name == ROW), None)
        if not isinstance(row, int) or not 0 <= row < len(self.configs):
            raise InputError(
                f"row {row!r} is not in {self.name}, which has rows 0 to {len(self.configs) - 1}.",
                remedy="Draw trials from the table's own configurations.",
            )
        return row


def make_table(
    *,
    name: str,
    metric: str,
    direction: Direction,
    hyperparameters: Sequence[Config],
    values: Floats,
    epoch_s: Sequence[float] | None = None,
    notes: Sequence[str] = (),
) -> CurveTable:
    """A table of these rows. Once a value is not finite the run has diverged, and does not come back."""
    lost = np.logical_or.accumulate(~np.isfinite(values), axis=1)
    clean = np.where(lost, math.nan, values)
    clean.flags.writeable = False
    diverged = int(lost[:, -1].sum())
    ends = [f"{diverged} of {len(values)} runs diverged."] if diverged else []
    return CurveTable(
        name=name,
        metric=metric,
        direction=direction,
        configs=tuple(((ROW, row), *config) for row, config in enumerate(hyperparameters)),
        values=clean,
        epoch_s=None if epoch_s is None else np.array(epoch_s, dtype=float),
        notes=(*notes, *ends),
    )


_SCHEDULE_WORDS = ("decay", "schedule", "warmup", "cosine", "step_hint")


def schedule_notes(names: Sequence[str], epochs: int) -> list[str]:
    """A warning where hyperparameters shape a schedule that was meant for the whole length."""
    shaping = sorted(
        name
        for name in set(names)
        if any(word in name.lower() for word in _SCHEDULE_WORDS) and "weight" not in name.lower()
    )
    if not shaping:
        return []
    note = (
        f"The learning-rate schedule ({', '.join(shaping)}) was chosen for all {epochs} epochs: a curve that "
        "is cut short is not what a schedule made for fewer epochs would have given."
    )
    return [note]
