"""Typed access to the tables of a TOML file. An error names the place, the value, the rule and the remedy."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stretto.core.errors import InputError, did_you_mean
from stretto.core.units import parse_duration_s

LARGEST = 10**9
"""Larger numbers are mistakes; up to here arithmetic is exact."""


class _Required:
    """Marks a value that has no default."""


REQUIRED: Final = _Required()


class Fields:
    """One table of a file. An unknown key raises an error at once."""

    def __init__(self, table: object, known: Sequence[str], *, file: str, name: str) -> None:
        self._file = file
        self._name = name
        if not isinstance(table, Mapping):
            raise InputError(
                f"{reprlib.repr(table)} is not a table.",
                where=f"{file}: {name}" if name else file,
                remedy=f"It holds {', '.join(known)}.",
            )
        self._table: Mapping[str, Any] = table
        for key in table:
            if key not in known:
                raise InputError(
                    f"{reprlib.repr(key)} is not known here.",
                    where=f"{file}: {name}" if name else file,
                    remedy=f"{did_you_mean(key, known)}There are {', '.join(known)}.",
                )

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def where(self, key: str) -> str:
        return f"{self._file}: {self._name}.{key}" if self._name else f"{self._file}: {key}"

    def wrong(self, key: str, rule: str, remedy: str = "") -> InputError:
        return InputError(
            f"{reprlib.repr(self._table[key])} is not {rule}.",
            where=self.where(key),
            remedy=remedy or "Give a value that is.",
        )

    def raw(self, key: str, default: Any = REQUIRED, *, rule: str = "a value") -> Any:
        """The value as it was written, or the default."""
        if key in self._table:
            return self._table[key]
        if default is REQUIRED:
            raise InputError(f"{key} is missing.", where=self.where(key), remedy=f"Give {rule}.")
        return default

    def table(self, key: str, known: Sequence[str], default: Any = REQUIRED) -> Fields:
        inner = self.raw(key, default, rule=f"a table with {', '.join(known)}")
        name = f"{self._name}.{key}" if self._name else key
        return Fields(inner, known, file=self._file, name=name)

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self.raw(key, default, rule="a text")
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.wrong(key, "a readable, non-empty text")
        return value

    def choice(self, key: str, options: Sequence[str], default: str | _Required = REQUIRED) -> str:
        rule = f"one of {', '.join(options)}"
        value = self.raw(key, default, rule=rule)
        if value not in options:
            raise self.wrong(key, rule)
        return str(value)

    def whole(
        self,
        key: str,
        default: int | _Required = REQUIRED,
        *,
        at_least: int = 1,
        at_most: int = LARGEST,
    ) -> int:
        rule = f"a whole number from {at_least} to {at_most}"
        value = self.raw(key, default, rule=rule)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.wrong(key, rule)
        return value

    def number(
        self,
        key: str,
        default: float | _Required = REQUIRED,
        *,
        above: float | None = None,
        below: float = math.inf,
    ) -> float:
        """A finite number of 0 or more; or greater than `above` and less than `below`."""
        rule = "a finite number, 0 or more" if above is None else f"a finite number above {above:g}"
        rule += f" and below {below:g}" if below < math.inf else f", at most {LARGEST:g}"
        value = _finite(self.raw(key, default, rule=rule))
        if value is None or not (value >= 0 if above is None else value > above) or not value < below:
            raise self.wrong(key, rule)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def duration_s(self, key: str) -> float:
        """A duration above 0, in seconds; written as a number or a text such as 1h30m."""
        value = self.raw(key, rule="a duration such as 90, 20m or 1h30m")
        seconds = parse_duration_s(value, where=self.where(key)) if isinstance(value, str) else _finite(value)
        if seconds is None or not 0 < seconds < math.inf:
            raise self.wrong(key, "a duration above 0", "Write seconds or units: 90, 20m, 1h30m.")
        return seconds

    def list(self, key: str, default: Any = REQUIRED, *, of: type, rule: str) -> list[Any]:
        value = self.raw(key, default, rule=rule)
        if not isinstance(value, list) or any(type(one) is not of for one in value):
            raise self.wrong(key, rule)
        return value


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


MOST_NAME_CHARACTERS = 100


MOST_NAME_BYTES = 200
"""In UTF-8. File systems allow 255, and file names add a suffix."""


NAME_RULE = (
    f"it names a folder, so it has no slashes and at most {MOST_NAME_CHARACTERS} characters, "
    f"of {MOST_NAME_BYTES} bytes together"
)


def is_folder_name(name: str) -> bool:
    """Whether every file system accepts this as the name of a folder."""
    if name in {"", ".", ".."} or "/" in name or not name.isprintable():
        return False
    return len(name) <= MOST_NAME_CHARACTERS and len(name.encode()) <= MOST_NAME_BYTES
