"""Ways to spoil a file: its values, its structure, its lines and its bytes."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Spoil = Callable[[random.Random, str], str]

DEPTH = 100_000
LONG = "x" * 100_000
LEAVES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**63,
    2**70,
    10**400,
    0.5,
    -0.0,
    5e-324,
    -1e-300,
    1e-12,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "a",
    "NaN",
    "\0",
    "\ud800",
    "é中😀" * 40,
    "../..",
    [],
    {},
    [None],
    [[[]]],
    {"": 0},
]
"""In the place of a value of JSON."""
TOKENS = [
    *("", "0", "-1", "1", "0.5", "1e308", "5e-324", "1e400", "nan", "NaN", "inf", "-Infinity", "-0.0"),
    *(str(10**400), str(2**63), str(2**70), "1" * 5000, "0x10", "1_000", "true", "null", "2020-01-01"),
    *('""', '"a"', '"\\u0000"', '"\\ud800"', '"é中😀"', '"' + "é" * 150 + '"', '"../.."', "'", '"', ","),
    *("[]", "{}", "[[1]]", "{a=1}", "=", "#", "\t", "\0", "\r", "[x]", "[[x]]", "six", "99999999999"),
]
"""In the place of a word, number or text of any file."""
HUGE = ["[" * DEPTH, "[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH, f'"{LONG}"', LONG, "a." * DEPTH + "b"]
"""The same, rarely: they take longer."""
BYTES = [b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\x1f\x8b", b"\n\n", b'"', b"{", b"}"]
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[-+]?\d[\w.+-]*|\w+')
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


def spoiled(chance: random.Random, text: str, ways: Sequence[Spoil]) -> bytes:
    """A few things of a text spoilt, now and then also its bytes."""
    for _ in range(chance.choice((1, 1, 1, 1, 1, 2, 4))):
        text = chance.choice(ways)(chance, text)
    data = text.encode("utf-8", "surrogatepass")
    return spoiled_bytes(chance, data) if chance.random() < 0.1 else data


def spoiled_bytes(chance: random.Random, data: bytes) -> bytes:
    """A bit turned round, a piece cut out, doubled or put in, or the end cut off."""
    at = chance.randrange(len(data) + 1)
    end = at + chance.choice((1, 1, 2, 8, 100))
    match chance.randrange(6):
        case 0 | 1 if at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + data[end:]
        case 4:
            return data[:end] + data[at:]
        case _:
            return data[:at] + chance.choice(BYTES) + data[at:]


def spoil_token(chance: random.Random, text: str) -> str:
    found = list(_TOKEN.finditer(text))
    if not found:
        return text
    one = chance.choice(found)
    new = chance.choice(HUGE) if chance.random() < 0.01 else chance.choice(TOKENS)
    return text[: one.start()] + new + text[one.end() :]


def spoil_number(chance: random.Random, text: str) -> str:
    """Another number where one was: somewhat or very different, or of the other sign."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    one = chance.choice(found)
    value = min(max(float(one[0]), -1e300), 1e300)
    powers = chance.choice((1, 3, 9, 30, 150))
    other = chance.choice((value + 1, value - 1, -value, value * 10.0**powers, value / 10.0**powers))
    new = str(int(other)) if other.is_integer() and chance.random() < 0.7 else repr(other)
    return text[: one.start()] + new + text[one.end() :]


def spoil_line(chance: random.Random, text: str) -> str:
    """A line left out, doubled, or put elsewhere."""
    lines = text.split("\n")
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    line = lines[at]
    match chance.randrange(3):
        case 0:
            del lines[at]
        case 1:
            lines.insert(to, line)
        case _:
            lines[at], lines[to] = lines[to], line
    return "\n".join(lines)


def spoil_json(chance: random.Random, text: str) -> str:
    """A part of a JSON value replaced, removed or doubled; a text that is none any more stays."""
    try:
        tree = json.loads(text)
        spoilt = json.dumps(_changed(chance, tree))
    except (ValueError, RecursionError):
        return text
    if chance.random() < 0.05:  # the same key twice
        return spoilt.replace("{", '{"epoch": 1, "key": "b", "time": 1, "jobs": [], ', 1)
    return spoilt


def _changed(chance: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        turn = chance.random()
        if turn < 0.15:
            del value[key]
        elif turn < 0.25:
            value[key + "x"] = _leaf(chance)
        else:
            value[key] = _changed(chance, value[key])
        return value
    if isinstance(value, list) and value and chance.random() < 0.9:
        index = chance.randrange(len(value))
        if chance.random() < 0.2:
            value.append(copy.deepcopy(value[index]))
        else:
            value[index] = _changed(chance, value[index])
        return value
    return _leaf(chance)


def _leaf(chance: random.Random) -> Any:
    return LONG if chance.random() < 0.01 else chance.choice(LEAVES)


ANY_TEXT: tuple[Spoil, ...] = (spoil_token, spoil_token, spoil_number, spoil_number, spoil_number, spoil_line)
JSON_TEXT: tuple[Spoil, ...] = (spoil_json, spoil_json, spoil_token, spoil_number, spoil_number, spoil_number)
