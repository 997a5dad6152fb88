"""Messages to JSON lines and back, by the type hints of their fields.

Incoming messages are checked and never executed. Workers must start without msgspec, hence our own decoder.
"""

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
"""Larger integers may not fit in a float."""


class WireError(Exception):
    """Data from the channel that is not a message."""


def encode(message: Message) -> bytes:
    """The message as one line."""
    return _write({"kind": type(message).__name__, **_fields(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line; WireError if there is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}") from error
    name = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise WireError(f"no message: {line[:80]!r}")
    message: Message = _read_dataclass(_KINDS[name], fields)
    return message


def _fields(holder: Any) -> dict[str, Any]:
    return {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}


_write = json.JSONEncoder(separators=(",", ":"), default=_fields).encode
_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _read(kind: Any, value: Any) -> Any:
    """The value as a scalar, union, dict, tuple of one kind or dataclass; WireError if it is not one."""
    origin, inner = _parts(kind)
    if origin in {typing.Union, types.UnionType}:
        return _read_union(inner, value)
    if origin is tuple and type(value) is list:
        return tuple(_read(inner[0], one) for one in value)
    if origin is dict and type(value) is dict:
        return {_read(inner[0], key): _read(inner[1], one) for key, one in value.items()}
    if type(value) is dict and dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value)
    if type(value) is kind:
        return value
    if kind is float and type(value) is int and abs(value) < _LARGEST_INT:
        return float(value)
    raise WireError(f"{str(value)[:80]!r} is not {getattr(kind, '__name__', kind)}")


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if type(value) in kinds:
        return value
    for kind in kinds:
        try:
            return _read(kind, value)
        except WireError:
            continue
    raise WireError(f"{str(value)[:80]!r} is not one of {kinds}")


def _read_dataclass(kind: Any, value: dict[str, Any]) -> Any:
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise WireError(f"{kind.__name__} has no {sorted(unknown)}")
    try:
        return kind(
            **{
                name: one if type(one) is hints[name] else _read(hints[name], one)
                for name, one in value.items()
            }
        )
    except TypeError as error:
        raise WireError(f"{kind.__name__}: {error}") from error
