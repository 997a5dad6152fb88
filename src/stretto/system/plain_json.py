"""Reads our own JSON files, which may be damaged; any damage raises UnreadableError."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20
"""The maximum size of a file; ours are much smaller."""
MOST_DEPTH = 100
"""The maximum nesting, as recursive functions process what was read."""
MOST_DIGITS = 300
"""The maximum length of an integer, so that it fits in a float."""


class UnreadableError(ValueError):
    """The content is damaged; the text says how."""


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """The content of a file. OSError if it cannot be opened, UnreadableError if it is damaged."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnreadableError(f"it has more than {most_bytes} bytes")
    return parse_json(content)


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """Parse a JSON text. UnreadableError if it is damaged.

    With `finite`, NaN and infinity count as damage. Without it, an integer with too many digits becomes
    infinity.
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
    """A checksum of an object that does not depend on order or white space."""
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
    """Check strings, numbers and depth, level by level and without recursion."""
    level = [parsed]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for value in level:
            match value:
                case str():
                    value.encode()  # fails for half a surrogate pair, which cannot be printed

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


def json_data(value: Any) -> Any:
    """Plain JSON data; what is not a finite number is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_data(item) for item in value]
    return value
