"""JSON of our own files, which may be damaged: whatever cannot be used is one kind of error."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20
"""Of a file; ours are far smaller."""
MOST_DEPTH = 100
"""Lists and objects within each other; what is read is walked through by functions that call themselves."""
MOST_DIGITS = 300
"""Of a whole number, which so always is a float, too."""


class UnreadableError(ValueError):
    """It is not JSON that we wrote; the text says what is wrong with it."""


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """What a file says. OSError if it cannot be opened, UnreadableError if it says nothing of use."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnreadableError(f"it has more than {most_bytes} bytes")
    return parse_json(content)


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """What a text says. UnreadableError for anything that could not be used later.

    With `finite`, numbers that are none or infinite count as damage; without, a whole number of too many
    digits is infinite.
    """
    try:
        parsed = json.loads(
            content,
            parse_int=_whole if finite else _whole_or_infinite,
            parse_constant=_no_number if finite else None,
        )
        _check(parsed, finite=finite)
    except UnreadableError:
        raise
    except RecursionError:
        raise UnreadableError("it is nested too deeply") from None
    except (ValueError, OverflowError, MemoryError) as error:
        raise UnreadableError(str(error) or type(error).__name__) from error
    return parsed


def checksum(tables: dict[str, Any]) -> str:
    """Of what an object says, however it is laid out."""
    written = json.dumps(tables, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise UnreadableError(f"a number has {len(digits)} digits")
    return int(digits)


def _whole_or_infinite(digits: str) -> float:
    return int(digits) if len(digits) <= MOST_DIGITS else (-math.inf if digits.startswith("-") else math.inf)


def _no_number(text: str) -> float:
    raise UnreadableError(f"a number is {text}")


def _check(parsed: Any, *, finite: bool) -> None:
    """Without calling itself: what is checked may be deep."""
    level = [parsed]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for value in level:
            match value:
                case str():
                    value.encode()  # half a surrogate pair cannot be shown
                case float() if finite and not math.isfinite(value):
                    raise UnreadableError("a number is too large")
                case dict():
                    below += value.keys()
                    below += value.values()
                case list():
                    below += value
                case _:
                    pass
        if not below:
            return
        level = below
    raise UnreadableError("it is nested too deeply")
