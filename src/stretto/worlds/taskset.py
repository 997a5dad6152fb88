"""Reads TaskSet learning curves: a JSON list of training runs with one optimiser and different settings.

Every entry is {"hp": {name: value}, "train" | "valid" | "test": {"loss": [51 numbers]}}: the loss before
training and after each fiftieth of it. The validation loss is what a study sees.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from stretto.core.errors import InputError
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.worlds.curves import CurveTable, make_table, schedule_notes

_GZIP_MAGIC = b"\x1f\x8b"


def read_taskset(path: Path) -> CurveTable:
    """Reads the validation losses of a TaskSet file, plain or gzipped, without the value before training."""
    entries = _parse(path)
    if not isinstance(entries, list) or not entries:
        raise InputError(
            f"the file holds {_shown(entries)}, not a list of runs.",
            where=str(path),
            remedy="Give a TaskSet file: a JSON list with an object for each run.",
        )
    configs = [_config(entry, f"{path}: run {index}") for index, entry in enumerate(entries)]
    losses = [_losses(entry, f"{path}: run {index}") for index, entry in enumerate(entries)]
    points = len(losses[0])
    for index, run in enumerate(losses):
        if len(run) != points:
            raise InputError(
                f"valid.loss has {len(run)} numbers, and that of run 0 has {points}.",
                where=f"{path}: run {index}",
                remedy="Give every run equally many.",
            )
    values = np.array(losses)[:, 1:]
    names = [name for config in configs for name, _ in config]
    return make_table(
        name=path.name.removesuffix(".gz").removesuffix(".json"),
        metric="valid loss",
        direction=Direction.MIN,
        hyperparameters=configs,
        values=values,
        notes=["The loss before training is left out.", *schedule_notes(names, values.shape[1])],
    )


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot be read ({reason}).", where=str(path), remedy="Give the path of a TaskSet file."
        ) from error


def _parse(path: Path) -> Any:
    data = _read(path)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise InputError(
            f"is not JSON ({error.msg}).",
            where=f"{path}:{error.lineno}",
            remedy="Fetch the file again, or correct it there.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"is not JSON ({type(error).__name__}).", where=str(path), remedy="Give a TaskSet file."
        ) from error


def _config(entry: Any, where: str) -> Config:
    settings = entry.get("hp") if isinstance(entry, dict) else None
    if not isinstance(settings, dict):
        raise InputError(
            f"hp is {_shown(settings)}.", where=where, remedy="Give an object of hyperparameters by name."
        )
    for name, value in settings.items():
        if not isinstance(value, str | int | float) or not math.isfinite(_as_float(value)):
            raise InputError(
                f"hp.{name} is {_shown(value)}, which is neither a finite number nor a text.",
                where=where,
                remedy="Correct this value.",
            )
    return tuple(settings.items())


def _losses(entry: Any, where: str) -> list[float]:
    part = entry.get("valid")
    losses = part.get("loss") if isinstance(part, dict) else None
    if not isinstance(losses, list) or len(losses) < 2:
        raise InputError(
            f"valid.loss is {_shown(losses)}.",
            where=where,
            remedy="Give a list: the loss before training and after each epoch.",
        )
    for point, loss in enumerate(losses):
        if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
            raise InputError(
                f"valid.loss[{point}] is {_shown(loss)}, not a number.",
                where=where,
                remedy="Give a number, or NaN for a run that diverged.",
            )
    return [math.nan if loss is None else _as_float(loss) for loss in losses]


def _as_float(value: str | float) -> float:
    """A number as a float, infinite if it is too large; 0 for any text."""
    if isinstance(value, str):
        return 0.0
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."
