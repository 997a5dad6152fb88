"""Loads learning curves by the name in a study file."""

from __future__ import annotations

from pathlib import Path

from stretto.core.errors import InputError, did_you_mean
from stretto.search.study import Direction
from stretto.worlds.algoperf import EPOCHS, read_algoperf
from stretto.worlds.curve_csv import read_curve_csv
from stretto.worlds.curves import FAMILIES, Curves
from stretto.worlds.taskset import read_taskset

WAYS = "builtin:NAME, taskset:FILE, algoperf:FOLDER:WORKLOAD[:EPOCHS] or csv:FILE[:max|min]"


def load_curves(
    text: str, *, folder: Path = Path(), direction: Direction = Direction.MAX, where: str = ""
) -> Curves:
    """Loads the curves that `text` names. Loading is slow, so share them between seeds.

    builtin:NAME, taskset:FILE, algoperf:FOLDER:WORKLOAD[:EPOCHS], csv:FILE[:max|min] or just FILE.csv.
    Paths are relative to `folder`. `direction` is for a CSV file whose name has none.
    """
    if not isinstance(text, str):
        raise _unknown(text, where)
    kind, colon, rest = text.partition(":")
    if kind == "builtin":
        return _family(text, where)
    if kind == "taskset" and rest:
        return read_taskset(folder / rest)
    if kind == "algoperf" and ":" in rest:
        return _algoperf(rest, folder)
    if kind == "csv" and rest:
        path, _, last = rest.rpartition(":")
        if path and last in (Direction.MAX, Direction.MIN):
            return read_curve_csv(folder / path, Direction(last))
        return read_curve_csv(folder / rest, direction)
    if text.endswith((".csv", ".csv.gz")) and not colon:
        return read_curve_csv(folder / text, direction)
    raise _unknown(text, where)


def _unknown(text: object, where: str) -> InputError:
    return InputError(f"curves {text!r} are of no known kind.", where=where, remedy=f"Write {WAYS}.")


def _family(text: str, where: str) -> Curves:
    found = next((family for family in FAMILIES if family.name == text), None)
    if found is not None:
        return found
    names = [family.name for family in FAMILIES]
    raise InputError(
        f"there are no curves {text!r}.",
        where=where,
        remedy=f"{did_you_mean(text, names)}There are {', '.join(names)}.",
    )


def _algoperf(rest: str, folder: Path) -> Curves:
    head, _, last = rest.rpartition(":")
    if last.isascii() and last.isdecimal() and len(last) < 10 and ":" in head:
        place, _, workload = head.rpartition(":")
        return read_algoperf(folder / place, workload, int(last))
    return read_algoperf(folder / head, last, EPOCHS)
