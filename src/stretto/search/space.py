"""Search spaces: the hyperparameters that vary between trials, and how they are drawn."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.core.errors import InputError
from stretto.core.job import Value

Config = tuple[tuple[str, Value], ...]
"""One trial's hyperparameters by name, in the order of the space."""

LARGEST_INT = 2**53
"""Whole numbers up to this size are exact as floats, which samplers compute with."""

_KINDS = ("float", "log", "int", "choice")
SPACE_FORMS = (
    "Write { float = [0.0, 0.5] }, { log = [1e-4, 1e-1] }, { int = [16, 128] } or { choice = [0.9, 0.99] }."
)


@dataclass(frozen=True, slots=True)
class FloatDimension:
    """A real number between two bounds; `log`: its logarithm is uniform."""

    name: str
    low: float
    high: float
    log: bool = False

    def sample(self, rng: np.random.Generator) -> float:
        if not self.log:
            return float(rng.uniform(self.low, self.high))
        value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class IntDimension:
    """A whole number between two bounds, both included. `log`: every doubling is equally likely."""

    name: str
    low: int
    high: int
    log: bool = False

    def sample(self, rng: np.random.Generator) -> int:
        if not self.log:
            return int(rng.integers(self.low, self.high, endpoint=True))
        value = math.exp(rng.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
        return min(max(round(value), self.low), self.high)


@dataclass(frozen=True, slots=True)
class ChoiceDimension:
    """One of several values, all equally likely."""

    name: str
    values: tuple[Value, ...]

    def sample(self, rng: np.random.Generator) -> Value:
        return self.values[int(rng.integers(len(self.values)))]


Dimension = FloatDimension | IntDimension | ChoiceDimension


@dataclass(frozen=True, slots=True)
class Space:
    """Named dimensions; a configuration has a value for each."""

    dimensions: tuple[Dimension, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dimensions)

    def sample(self, rng: np.random.Generator) -> Config:
        return tuple((dimension.name, dimension.sample(rng)) for dimension in self.dimensions)


def parse_space(tables: Mapping[str, Any], *, where: str) -> Space:
    """The space of a study file's [space] section; `where` names the file."""
    return Space(tuple(_dimension(name, table, f"{where}: space.{name}") for name, table in tables.items()))


def _dimension(name: str, table: object, where: str) -> Dimension:
    if not name or not name.isprintable():
        raise InputError(f"{name!r} is not a readable name.", where=where, remedy="Name the hyperparameter.")
    if not isinstance(table, Mapping):
        raise InputError(
            f"{reprlib.repr(table)} says no kind and no bounds.", where=where, remedy=SPACE_FORMS
        )
    whole_log = "int" in table and "log" in table
    kinds = [kind for kind in _KINDS if kind in table and not (whole_log and kind == "log")]
    unknown = [key for key in table if key not in _KINDS]
    if len(kinds) != 1 or unknown:
        raise InputError(
            f"{reprlib.repr(dict(table))} is not one of the four kinds.", where=where, remedy=SPACE_FORMS
        )
    kind = kinds[0]
    if kind == "choice":
        return ChoiceDimension(name, _choices(table["choice"], where))
    if kind == "int":
        return _whole(name, table, where)
    low, high = _bounds(table[kind], where)
    if kind == "log" and low <= 0:
        raise InputError(
            f"log starts at {low:g}, which has no logarithm.", where=where, remedy="Start above 0."
        )
    return FloatDimension(name, low, high, log=kind == "log")


def _whole(name: str, table: Mapping[str, Any], where: str) -> IntDimension:
    log = table.get("log", False)
    if not isinstance(log, bool):
        raise InputError(
            f"log = {reprlib.repr(log)} is neither true nor false.",
            where=where,
            remedy="Beside int it is a switch.",
        )
    low, high = _bounds(table["int"], where)
    if not (low.is_integer() and high.is_integer() and max(abs(low), abs(high)) <= LARGEST_INT):
        raise InputError(
            f"int = {reprlib.repr(table['int'])} are not whole numbers.",
            where=where,
            remedy="Give whole bounds, such as { int = [16, 128] }.",
        )
    if log and low < 1:
        raise InputError(
            f"int starts at {low:g}, which a log scale does not reach.",
            where=where,
            remedy="Start at 1 or more.",
        )
    return IntDimension(name, int(low), int(high), log)


def _bounds(value: object, where: str) -> tuple[float, float]:
    pair = value if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(_is_number(bound) for bound in pair):
        raise InputError(
            f"{reprlib.repr(value)} are not two finite numbers.",
            where=where,
            remedy="Give [lowest, highest].",
        )
    low, high = float(pair[0]), float(pair[1])
    if not low < high or not math.isfinite(high - low):
        raise InputError(
            f"the bounds {reprlib.repr(value)} do not ascend, or lie too far apart.",
            where=where,
            remedy="Give [lowest, highest]; a single value is { choice = [value] }.",
        )
    return low, high


def _choices(values: object, where: str) -> tuple[Value, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise InputError(
            f"choice = {reprlib.repr(values)} lists no values.",
            where=where,
            remedy="Give one or more: [0.9, 0.99].",
        )
    taken: list[Value] = []
    for value in values:
        if not (isinstance(value, str | bool) or _is_number(value)):
            raise InputError(
                f"{reprlib.repr(value)} cannot be a choice.",
                where=where,
                remedy="Choices are finite numbers, texts, true and false.",
            )
        if value in taken:
            raise InputError(f"choice has {reprlib.repr(value)} twice.", where=where, remedy="Leave one out.")
        taken.append(value)
    return tuple(taken)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST_INT if isinstance(value, int) else math.isfinite(value)
