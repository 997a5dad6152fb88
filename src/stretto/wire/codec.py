"""Messages to JSON lines and back. What comes in is checked against the message's types, never executed."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from stretto.wire.messages import Message

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


_LARGEST_INT = 1 << 1000
"""A float can hold no number much larger."""


class WireError(Exception):
    """What came over the channel is not a message."""


Reader = Callable[[Any], Any]
"""Gives a value back as one of some kind; WireError if it is none."""


def encode(message: Message) -> bytes:
    """One line."""
    return _write({"kind": type(message).__name__, **_fields(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line; WireError if it is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}") from error
    name = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise WireError(f"no message: {line[:80]!r}")
    kind: Any = _KINDS[name]
    message: Message = _reader(kind)(fields)
    return message


def _fields(holder: Any) -> dict[str, Any]:
    return {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}


_write = json.JSONEncoder(separators=(",", ":"), default=_fields).encode


@functools.cache
def _reader(kind: Any) -> Reader:
    """Of a scalar, a union, a dict, a tuple of one kind or a dataclass."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        return _union_reader(inner)
    if origin is dict:
        return _dict_reader(_reader(inner[0]), _reader(inner[1]))
    if origin is tuple:
        return _tuple_reader(_reader(inner[0]))
    return _scalar_reader(kind)


def _scalar_reader(kind: Any) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int and abs(value) < _LARGEST_INT:
            return float(value)
        raise _odd(value, kind)

    return read


def _dict_reader(read_key: Reader, read_value: Reader) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _odd(value, dict)
        return {read_key(key): read_value(one) for key, one in value.items()}

    return read


def _tuple_reader(read_one: Reader) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise _odd(value, list)
        return tuple(map(read_one, value))

    return read


def _union_reader(kinds: tuple[Any, ...]) -> Reader:
    readers = {kind: _reader(kind) for kind in kinds}

    def read(value: Any) -> Any:
        exact = readers.get(type(value))
        if exact is not None:
            return exact(value)
        for read_one in readers.values():
            try:
                return read_one(value)
            except WireError:
                continue
        raise _odd(value, kinds)

    return read


def _dataclass_reader(kind: Any) -> Reader:
    readers = {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _odd(value, kind)
        if unknown := value.keys() - readers.keys():
            raise WireError(f"{kind.__name__} has no {sorted(unknown)}")
        try:
            return kind(**{name: readers[name](one) for name, one in value.items()})
        except TypeError as error:
            raise WireError(f"{kind.__name__}: {error}") from error

    return read


def _odd(value: Any, kind: Any) -> WireError:
    return WireError(f"{str(value)[:80]!r} is not {getattr(kind, '__name__', kind)}")
