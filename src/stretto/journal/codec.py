"""Events to JSON and back, checked against their types.

JSON has no NaN and no infinity. An event that holds one is refused when it is written: a loss that is
not a number is None by then (`LossPoint`), and anywhere else such a number is a mistake that a fold
would only meet much later. A policy's memory must come back as it went in, so it is plain JSON data:
lists rather than tuples, keys that are strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from stretto.core.errors import JournalError
from stretto.core.events import EVENT_TYPES, Decided, Event

SCHEMA = 1
"""Version of what payloads look like; a change that older code would misread raises it."""

_TYPE_OF_KIND: dict[str, type[Event]] = {event_type.kind: event_type for event_type in EVENT_TYPES}

_write = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def encode(event: Event) -> str:
    """The event as one JSON object, without its kind."""
    fields = _plain(event)
    try:
        text = _write(fields)
    except ValueError as error:
        odd = "; ".join(_non_finite(fields, "")) or str(error)
        raise JournalError(
            f"{_name(event)} cannot be journaled: {odd}. Numbers in events are finite. "
            "Leave the number out, or use null, where it is made."
        ) from error
    if isinstance(event, Decided) and json.loads(text)["memory"] != event.memory:
        raise JournalError(
            f"{_name(event)} cannot be journaled: its memory would come back changed. Memory is plain JSON "
            "data. Use lists instead of tuples, text as keys, and no objects."
        )
    return text


def decode(kind: str, payload: str) -> Event:
    """The event that `encode` turned into `payload`."""
    event_type = _TYPE_OF_KIND.get(kind)
    if event_type is None:
        known = ", ".join(_TYPE_OF_KIND)
        raise JournalError(f"{kind!r} is not a kind of event; there are {known}.")
    try:
        return msgspec.convert(json.loads(payload), event_type)
    except (ValueError, msgspec.ValidationError) as error:
        raise JournalError(f"a {kind} event does not read as one: {error}.") from error


def _plain(event: Event) -> Any:
    try:
        return msgspec.to_builtins(event, enc_hook=_plain_number)
    except TypeError as error:
        raise JournalError(
            f"{_name(event)} cannot be journaled: {error}. Events hold plain data. "
            "Turn the value into a number, text, list or dict where the event is made."
        ) from error


def _plain_number(value: Any) -> float:
    if isinstance(value, float):  # numpy's float64 is a float by type, and counts as one here
        return float(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _non_finite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _non_finite(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _non_finite(inner, f"{path}[{index}]")


def _name(event: Event) -> str:
    return f"{event.kind} of {event.subject!r} at {event.t_s} s"
