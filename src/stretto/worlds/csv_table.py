"""Reads CSV files. Every cell is checked, and every error names its line."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One line of a table, by column."""

    path: Path
    line: int
    cells: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def text(self, column: str) -> str:
        cell = self.cells[column]
        if not cell or not cell.isprintable():
            raise self._wrong(column, "is not a readable, non-empty text")
        return cell

    def number(self, column: str, *, at_least: float = 0.0) -> float:
        """A finite number of `at_least` or more."""
        cell = self.cells[column]
        value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
        if not math.isfinite(value):
            raise self._wrong(column, "is not a finite number")
        if value < at_least:
            raise self._wrong(column, f"is below {at_least:g}")
        return value

    def positive(self, column: str) -> float:
        value = self.number(column)
        if value == 0.0:
            raise self._wrong(column, "is not above 0")
        return value

    def whole(self, column: str, *, at_least: int = 1) -> int:
        value = self.number(column, at_least=at_least)
        if not value.is_integer():
            raise self._wrong(column, "is not a whole number")
        return int(value)

    def _wrong(self, column: str, rule: str) -> InputError:
        cell = self.cells[column]
        shown = cell if len(cell) <= 40 else cell[:37] + "..."
        return InputError(
            f"{column} {shown!r} {rule}.", where=self.where, remedy=f"Correct the {column} of this row."
        )


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A file with a header; every row has as many cells as the header."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[CsvRow, ...]

    def require(self, expected: Sequence[str]) -> CsvTable:
        """The table itself, if it has exactly the expected columns, in any order."""
        missing = [column for column in expected if column not in self.columns]
        extra = [column for column in self.columns if column not in expected]
        if missing or extra:
            wrong = [f"no column {_names(missing)}"] * bool(missing)
            wrong += [f"unknown column {_names(extra)}"] * bool(extra)
            raise InputError(
                f"{' and '.join(wrong)}.",
                where=f"{self.path}:1",
                remedy=f"The header must be {','.join(expected)} (in any order).",
            )
        return self


def read_table(path: Path) -> CsvTable:
    """Reads a UTF-8 CSV file, plain or gzipped, with a header and one row or more; it skips blank lines."""
    lines = _split(path, _decode(path, _read(path)))
    if not lines:
        raise InputError("the file is empty.", where=f"{path}:1", remedy="Give a CSV file with a header.")
    _, header = lines[0]
    columns = tuple(header)
    if len(set(columns)) != len(columns):
        twice = sorted({column for column in columns if columns.count(column) > 1})
        raise InputError(
            f"column {_names(twice)} appears more than once.",
            where=f"{path}:1",
            remedy="Name each column once.",
        )
    if len(lines) == 1:
        raise InputError("the file has a header but no rows.", where=f"{path}:1", remedy="Add a row.")
    return CsvTable(path, columns, tuple(_row(path, line, columns, cells) for line, cells in lines[1:]))


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"cannot be read ({reason}).", where=str(path), remedy="Give the path of a CSV file."
        ) from error
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"is damaged gzip data ({error}).", where=str(path), remedy="Fetch or compress the file again."
        ) from error


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"byte {data[error.start]:#04x} is not UTF-8 text.",
            where=f"{path}:{line}",
            remedy="Save the file as UTF-8 CSV.",
        ) from error


def _split(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """The cells and the number of every line that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines = []
    try:
        for record in reader:
            cells = [cell.strip() for cell in record]
            if cells not in ([], [""]):
                lines.append((reader.line_num, cells))
    except csv.Error as error:
        raise InputError(
            f"is not CSV ({error}).",
            where=f"{path}:{reader.line_num}",
            remedy="Quote cells with double quotes, close every quote, one row a line.",
        ) from error
    return lines


def _row(path: Path, line: int, columns: tuple[str, ...], cells: list[str]) -> CsvRow:
    if len(cells) != len(columns):
        raise InputError(
            f"{len(cells)} cells where the header has {len(columns)}.",
            where=f"{path}:{line}",
            remedy=f"Give a value for each of {_names(columns)}.",
        )
    return CsvRow(path, line, dict(zip(columns, cells, strict=True)))


def _names(columns: Sequence[str]) -> str:
    shown = ", ".join(column if column and column.isprintable() else repr(column) for column in columns)
    return shown if len(shown) <= 120 else shown[:117] + "..."
