"""Learning curves: what a trial's metric is after each epoch, from a table or a formula.

Curves by formula (builtin:resnet, builtin:cifar, builtin:toy) are synthetic: shaped like those of real
training, but not measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stretto.core.errors import InputError
from stretto.core.job import Value
from stretto.search.space import Config
from stretto.search.study import Direction

Floats = npt.NDArray[np.float64]

ROW = "row"
"""Key of a configuration that holds its row of a table."""


class Curves(Protocol):
    """The source of a study's learning curves."""

    @property
    def name(self) -> str:
        """The name for users."""

    @property
    def metric(self) -> str:
        """What is measured after each epoch."""

    @property
    def direction(self) -> Direction:
        """Whether more or less is better."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what users should know about these curves."""

    @property
    def most_epochs(self) -> int | None:
        """Length of the curves; None: unlimited."""

    @property
    def configs(self) -> tuple[Config, ...] | None:
        """The only configurations with curves; None: any configuration."""

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:
        """The metric after each of the first `epochs` epochs, NaN once the trial has diverged."""

    def relative_time(self, config: Config) -> float | None:
        """Time of an epoch relative to the mean over configurations; None: not known."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CurveTable:
    """Measured curves: one row per training run."""

    name: str
    metric: str
    direction: Direction
    configs: tuple[Config, ...]
    """The configuration of each row; its first pair is ("row", 0), ("row", 1), .."""
    values: Floats
    """The metric by row and epoch; NaN from the epoch in which a run diverged."""
    epoch_s: Floats | None = None
    """Mean epoch time of each row, if measured."""
    notes: tuple[str, ...] = ()

    @property
    def most_epochs(self) -> int:
        return int(self.values.shape[1])

    @property
    def diverged(self) -> int:
        """Rows that end in NaN."""
        return int(np.isnan(self.values[:, -1]).sum())

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:  # noqa: ARG002
        """The values of the row; `rng` is not used."""
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
    """A table of these rows. From the first value that is not finite, a run has diverged."""
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
    """A warning if a hyperparameter is a schedule that was made for the whole length."""
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


LEARNING_RATE = ("lr", "learning_rate")
MOMENTUM = ("momentum",)
WEIGHT_DECAY = ("weight_decay", "wd")
TAU = 2.0 * math.pi


class _Synthetic:
    """Base class of all formulas: they have any configuration and any length, but no epoch times."""

    direction = Direction.MAX
    metric = "accuracy"
    configs: tuple[Config, ...] | None = None
    most_epochs: int | None = None

    def relative_time(self, config: Config) -> float | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Shape:
    """One trial's expected curve: chance + (top - chance) (1 - (1 + epoch / tau)^-beta)."""

    top: float
    """Its limit."""
    tau: float
    """Epochs until it starts to learn."""


@dataclass(frozen=True, kw_only=True)
class SgdFamily(_Synthetic):
    """A synthetic image classifier trained with SGD.

    The effective learning rate is lr / (1 - momentum), and x is its distance from the best one in powers of
    ten. Too low a rate learns late, too high a rate ends lower, and far too high a rate diverges. Little
    weight decay learns fast and ends lower. Every configuration also draws a trade-off between learning early
    and ending high, so that curves cross. Other hyperparameters change the end a little.
    """

    name: str
    chance: float
    top: float
    """Accuracy of the best configurations after endless training."""
    tau: float
    beta: float
    best_rate: float
    """The best lr / (1 - momentum)."""
    best_weight_decay: float
    noise_sd: float
    """Standard deviation of the accuracy after an epoch."""
    trial_sd: float
    """Standard deviation of the end, between two trainings of one configuration."""

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"The curves of {self.name} are synthetic.",)

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:
        x = self._too_fast(config)
        shape = self._shape(config, x)
        top = shape.top + self.trial_sd * rng.standard_normal()
        done = 1.0 - (1.0 + np.arange(1, epochs + 1) / shape.tau) ** -self.beta
        noise = self.noise_sd * rng.standard_normal(epochs)
        values: Floats = np.clip(self.chance + (top - self.chance) * done + noise, 0.0, 1.0)
        diverges = rng.random() < 1.0 / (1.0 + math.exp(min(-7.0 * (x - 1.1), 50.0)))
        if diverges:
            values[int(rng.geometric(0.2)) - 1 :] = math.nan
        return tuple(values.tolist())

    def _too_fast(self, config: Config) -> float:
        rate = _number(config, LEARNING_RATE, 0.0, math.inf)
        momentum = _number(config, MOMENTUM, -1e-12, 1.0)
        usual = self.best_rate * 0.1
        return math.log10((rate or usual) / (1.0 - (0.9 if momentum is None else momentum)) / self.best_rate)

    def _shape(self, config: Config, x: float) -> Shape:
        decay = _number(config, WEIGHT_DECAY, 0.0, math.inf)
        w = 0.0 if decay is None else max(-2.0, min(math.log10(decay / self.best_weight_decay), 2.0))
        late = _normal(config)
        low, high = min(x, 0.0), max(x, 0.0)
        loss = 0.008 * low**2 + 0.035 * high**2 + 0.006 * w**2 - 0.008 * late + self._others(config)
        exponent = -0.55 * low + 0.25 * high + 0.1 * w + 0.2 * late
        floor = self.chance + 0.1 * (self.top - self.chance)
        return Shape(top=max(self.top - loss, floor), tau=self.tau * 10.0 ** min(exponent, 6.0))

    def _others(self, config: Config) -> float:
        known = {*LEARNING_RATE, *MOMENTUM, *WEIGHT_DECAY}
        return sum(_effect(name, value) for name, value in config if name not in known)


@dataclass(frozen=True)
class ToyFamily(_Synthetic):
    """The toy of HyperSched's ablation, synthetic by design; after k epochs

    loss = 1 / (b0 k / 100 + 0.1 b1 + 0.5) + 0.01 b2 + |N(0, 0.005)|, accuracy = (2 - loss) / 2,
    b0 exponential with mean 0.1, b1 and b2 uniform in 0..1, each unless the configuration gives it.
    """

    name: str = "builtin:toy"

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"The curves of {self.name} are synthetic.",)

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:
        drawn = (rng.exponential(0.1), rng.random(), rng.random())
        given = (_number(config, (name,), -1e-12, math.inf) for name in ("b0", "b1", "b2"))
        b0, b1, b2 = (draw if value is None else value for value, draw in zip(given, drawn, strict=True))
        k = np.arange(1, epochs + 1)
        with np.errstate(over="ignore"):  # a slope beyond all bounds ends at once
            loss = 1.0 / (b0 * k / 100.0 + 0.1 * b1 + 0.5) + 0.01 * b2
        noise: Floats = np.abs(rng.normal(0.0, 0.005, epochs))
        values = (2.0 - loss - noise) / 2.0
        return tuple(values.tolist())


RESNET = SgdFamily(
    name="builtin:resnet",
    chance=0.1,
    top=0.95,
    tau=4.0,
    beta=1.0,
    best_rate=1.0,
    best_weight_decay=5e-4,
    noise_sd=0.004,
    trial_sd=0.003,
)
"""For studies of several hundred epochs."""

CIFAR = SgdFamily(
    name="builtin:cifar",
    chance=0.1,
    top=0.95,
    tau=2.0,
    beta=0.78,
    best_rate=1.0,
    best_weight_decay=5e-4,
    noise_sd=0.003,
    trial_sd=0.003,
)
"""Follows the results of HyperSched on CIFAR-10: the best of 14 configurations of its grid
reaches about 0.84 after 24 epochs, 0.89 after 60, 0.91 after 100 and 0.92 to 0.93 after 200.
"""

FAMILIES: tuple[SgdFamily | ToyFamily, ...] = (RESNET, CIFAR, ToyFamily())


def _number(config: Config, names: tuple[str, ...], above: float, below: float) -> float | None:
    """The first of these hyperparameters, if it is a number strictly between the bounds."""
    for name, value in config:
        if name in names and isinstance(value, int | float) and above < value < below:
            return float(value)
    return None


def _effect(name: str, value: Value) -> float:
    """The effect of an unknown hyperparameter: 0 to 0.012, smooth for a number."""
    phase = _unit(name)
    if isinstance(value, bool | str):
        return 0.012 * _unit(f"{name}={value}")
    size = math.log10(1e-12 + min(abs(value), 1e300))
    return 0.006 * (1.0 + math.sin(TAU * (size / 3.0 + phase)))


def _normal(config: Config) -> float:
    """A standard normal number that depends on the configuration only."""
    text = repr(sorted(config))
    radius = math.sqrt(-2.0 * math.log(1.0 - _unit(f"radius {text}")))
    return radius * math.cos(TAU * _unit(f"angle {text}"))


def _unit(text: str) -> float:
    """A hash of the text as a number in [0, 1)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
