"""Messages to JSON lines and back. What comes in is checked against the message's types, never executed."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any

from stretto.wire.messages import Message

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


_LARGEST_INT = 1 << 1000
"""A float can hold no number much larger."""


class WireError(Exception):
    """What came over the channel is not a message."""


def encode(message: Message) -> bytes:
    """One line."""
    fields = {"kind": type(message).__name__, **dataclasses.asdict(message)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line; WireError if it is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}") from error
    name = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise WireError(f"no message: {line[:80]!r}")
    kind = _KINDS[name]
    message: Message = _read(kind, fields)
    return message


def _read(kind: Any, value: Any) -> Any:
    """`value` as a `kind`, which is a scalar, a union, a dict, a tuple of one kind or a dataclass."""
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        return _read_any(inner, value)
    if origin is dict and isinstance(value, dict):
        return {_read(inner[0], key): _read(inner[1], one) for key, one in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], one) for one in value)
    if kind is float and type(value) is int and abs(value) < _LARGEST_INT:
        return float(value)
    if kind is type(value) or (kind is type(None) and value is None):
        return value
    raise WireError(f"{str(value)[:80]!r} is not {kind}")


def _read_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"{str(value)[:80]!r} is not {kind.__name__}")
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise WireError(f"{kind.__name__} has no {sorted(unknown)}")
    try:
        return kind(**{name: _read(hints[name], one) for name, one in value.items()})
    except TypeError as error:
        raise WireError(f"{kind.__name__}: {error}") from error


def _read_any(kinds: tuple[Any, ...], value: Any) -> Any:
    exact = [kind for kind in kinds if kind is type(value)]
    for kind in (*exact, *kinds):
        try:
            return _read(kind, value)
        except WireError:
            continue
    raise WireError(f"{str(value)[:80]!r} is none of {kinds}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
