"""Your own price lists: a CSV file, or tables of a study file."""

from __future__ import annotations

import csv
import io
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.pricing.instances import Instance

COLUMNS = ("instance", "gpus", "usd_per_hour")
OPTIONAL_COLUMNS = ("gpu_type", "speed")
KEYS = ("name", "gpus", "usd_per_hour", *OPTIONAL_COLUMNS)

MOST_GPUS = 1024
"""More GPUs in one node are a mistake."""

LARGEST = 1e9
"""A larger price is a mistake."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def read_price_list(path: Path) -> tuple[Instance, ...]:
    """The instance types of a CSV file: instance,gpus,usd_per_hour and optionally gpu_type,speed."""
    lines = _lines(path)
    at, header = next(lines, (1, []))
    _check_header(header, f"{path}:{at}")
    found: dict[str, Instance] = {}
    for line, cells in lines:
        where = f"{path}:{line}"
        if len(cells) != len(header):
            raise InputError(
                f"{len(cells)} cells where the header has {len(header)}.",
                where=where,
                remedy=f"Give a value for each of {', '.join(header)}.",
            )
        row = {column: _cell(column, cell) for column, cell in zip(header, cells, strict=True)}
        instance = make_instance({"name": row.pop("instance"), **row}, where=where)
        if instance.name in found:
            raise InputError(f"{instance.name!r} has a price already.", where=where, remedy="Keep one row.")
        found[instance.name] = instance
    if not found:
        raise InputError("the file has no prices.", where=str(path), remedy="Add a row for each type.")
    return tuple(found.values())


def make_instance(values: Mapping[str, Any], *, where: str) -> Instance:
    """An instance type from named values, each checked."""
    for key in values:
        if key not in KEYS:
            raise InputError(
                f"{reprlib.repr(key)} is not known here.", where=where, remedy=f"There are {', '.join(KEYS)}."
            )
    for key in KEYS[:3]:
        if key not in values:
            raise InputError(f"{key} is missing.", where=where, remedy=f"Needed are {', '.join(KEYS[:3])}.")
    name, gpu_type = values["name"], values.get("gpu_type", "")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise _wrong("name", name, "a readable, non-empty text", where)
    if not isinstance(gpu_type, str):
        raise _wrong("gpu_type", gpu_type, "a text", where)
    gpus = _number(values["gpus"])
    if not (gpus.is_integer() and 1 <= gpus <= MOST_GPUS):
        raise _wrong("gpus", values["gpus"], f"a whole number from 1 to {MOST_GPUS}", where)
    usd_per_hour = _number(values["usd_per_hour"])
    if not usd_per_hour >= 0:
        raise _wrong("usd_per_hour", values["usd_per_hour"], "a finite number, 0 or more", where)
    speed = _number(values.get("speed", 1.0))
    if not speed > 0:
        raise _wrong("speed", values["speed"], "a finite number above 0", where)
    return Instance(name=name, gpus=int(gpus), usd_per_hour=usd_per_hour, gpu_type=gpu_type, speed=speed)


def _number(value: Any) -> float:
    """A number in the allowed range, or NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
        return math.nan
    return float(value)


def _wrong(key: str, value: object, rule: str, where: str) -> InputError:
    return InputError(
        f"{key} {reprlib.repr(value)} is not {rule}.", where=where, remedy=f"Correct the {key}."
    )


def _cell(column: str, cell: str) -> str | float:
    """Convert numbers; other text stays and is refused later."""
    if column in ("instance", "gpu_type") or not _NUMBER.fullmatch(cell):
        return cell
    return float(cell)


def _check_header(header: list[str], where: str) -> None:
    allowed = (*COLUMNS, *OPTIONAL_COLUMNS)
    missing = [column for column in COLUMNS if column not in header]
    unknown = [column for column in header if column not in allowed]
    if missing or unknown or len(set(header)) != len(header):
        wrong = f"no column {', '.join(missing)}" if missing else "columns that are not known, or twice"
        raise InputError(
            f"the header {','.join(header)[:80]!r} has {wrong}.",
            where=where,
            remedy=f"It takes {','.join(COLUMNS)} and, if wanted, {','.join(OPTIONAL_COLUMNS)}.",
        )


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that is not blank, with its line number."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text.", where=str(path), remedy="Save it as UTF-8 CSV.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot be read ({reason}).", where=str(path), remedy="Give the path of a CSV file."
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for record in reader:
            cells = [cell.strip() for cell in record]
            if any(cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise InputError(
            f"is not CSV ({error}).",
            where=f"{path}:{reader.line_num}",
            remedy="One row a line, quotes closed.",
        ) from error
