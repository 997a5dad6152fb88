"""Events to JSON and back, checked against their types. A policy's memory is written as differences:

    [value]                             it is this value now
    {"d": {key: change}, "-": [key]}    an object: keys that changed or are new, and keys that are gone
    {"i": {index: change}}              a list of the same length: elements that changed
    {"s": [[at, gone, [values]]]}       a list: replacements of elements, one after the other

Order counts, also of the keys of an object. Data is never changed in place, so the same object means the
same data.

JSON has no NaN and no infinity. An event that holds one is refused when it is written: a loss that is not a
number is None by then (`LossPoint`), and anywhere else it is a mistake that would only show much later. A
policy's memory must come back as it was, so it is plain JSON data: lists rather than tuples, string keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from operator import is_, is_not
from typing import Any, Final

import msgspec

from stretto.core.cluster import Wish
from stretto.core.decision import Reason
from stretto.core.errors import JournalError
from stretto.core.events import EVENT_TYPES, Decided, Event, JobFailed, JobNoted, JobRetried, NoteKind
from stretto.core.instructions import Instruction

FEW = 16
"""At most this many changed elements of a list are written one by one."""
_SCALARS = (str, int, float, bool, type(None))


def difference(old: Any, new: Any) -> Any:
    """The change from `old` to `new`; None if they are equal, including the types of numbers."""
    if old is new:
        return None
    kind = type(new)
    if type(old) is not kind:
        return [new]
    if kind is dict:
        return _of_objects(old, new)
    if kind is list:
        return _of_lists(old, new)
    if kind not in _SCALARS or old != new:
        return [new]
    return [new] if kind is float and not new and str(old) != str(new) else None  # 0.0 and -0.0


def changed(old: Any, change: Any) -> Any:
    """Apply a change of `difference` to `old`; the result shares unchanged parts with `old`."""
    if change is None:
        return old
    if isinstance(change, list):
        return change[0]
    if "d" in change:
        found = dict(old)
        for key in change.get("-", ()):
            del found[key]
        for key, inner in change["d"].items():
            found[key] = changed(found.get(key), inner)
        return found
    elements = list(old)
    if "i" in change:
        for index, inner in change["i"].items():
            elements[int(index)] = changed(elements[int(index)], inner)
    else:
        for at, gone, values in change["s"]:
            elements[at : at + gone] = values
    return elements


def _of_objects(old: dict[Any, Any], new: dict[Any, Any]) -> Any:
    gone = [] if new.keys() >= old.keys() else [key for key in old if key not in new]
    fresh = [] if old.keys() >= new.keys() else [key for key in new if key not in old]
    kept = [key for key in old if key in new] if gone else list(old)
    if list(new) != kept + fresh:
        return [new]
    suspects = compress(kept, map(is_not, map(old.get, kept), map(new.get, kept)))
    found = {key: inner for key in suspects if (inner := difference(old[key], new[key])) is not None}
    found |= {key: [new[key]] for key in fresh}
    if gone:
        return {"d": found, "-": gone}
    return {"d": found} if found else None


def _of_lists(old: list[Any], new: list[Any]) -> Any:
    if len(old) == len(new):
        suspects = list(compress(range(len(old)), map(is_not, old, new)))
        if len(suspects) <= FEW or isinstance(new[suspects[0]], dict | list):
            pairs = ((index, difference(old[index], new[index])) for index in suspects)
            found = {str(index): inner for index, inner in pairs if inner is not None}
            return {"i": found} if found else None
        if all(map(is_, old[1:], new)):  # a sliding window
            return {"s": [[0, 1, []], [len(old) - 1, 0, [new[-1]]]]}
    shorter = min(len(old), len(new))
    start = _alike(old, new, shorter)
    end = _alike(old[::-1], new[::-1], shorter - start)
    if not start and not end:
        return [new]
    if start == end == len(old) == len(new):
        return None
    return {"s": [[start, len(old) - start - end, new[start : len(new) - end]]]}


def _alike(old: list[Any], new: list[Any], most: int) -> int:
    """The number of equal elements at the start."""
    for number in compress(range(most), map(is_not, old, new)):
        if difference(old[number], new[number]) is not None:
            return number
    return most


SCHEMA = 2
"""The version of the payloads; a change that older code would misread raises it."""
WHOLE_MEMORY = 1
"""The version in which decisions have their whole memory, and events have no checksum."""
READ: Final = (WHOLE_MEMORY, SCHEMA)


class Unknown:
    """Stands for an unknown memory."""


UNKNOWN: Final = Unknown()
Before = Any
"""The memory of the previous decision, or UNKNOWN."""

_OLD_LOG = "\nlog: "
_OLD_NOTES = {
    "it did not save and leave in time and was killed": NoteKind.NOT_SAVED,
    "while it left: ": NoteKind.NOT_SAVED,
    "the training code was still being imported": NoteKind.NOT_BEGUN,
    "the training function had not come to run.epochs() or run.steps()": NoteKind.NOT_BEGUN,
}
"""How notes of older journals begin."""

_write = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecidedText:
    """A decision as it is written: with its memory, with the change of it, or with neither."""

    t_s: float
    policy: str
    instructions: tuple[Instruction, ...]
    reasons: dict[str, Reason]
    memory: Any = msgspec.UNSET
    change: Any = None
    wake_at_s: float | None = None
    wish: Wish | None = None


_DECODER_OF_KIND: dict[str, msgspec.json.Decoder[Any]] = {
    event_type.kind: msgspec.json.Decoder(_DecidedText if event_type is Decided else event_type)
    for event_type in EVENT_TYPES
}


def encode(event: Event, before: Before = UNKNOWN) -> str:
    """The event as a JSON object without its kind; `before` is the memory of the previous decision."""
    if isinstance(event, Decided):
        return _encode_decision(event, before)
    return _text(event, _plain(event, event))


def decode(kind: str, payload: str | bytes, before: Before = UNKNOWN, *, with_memory: bool = True) -> Event:
    """The event of a payload; decisions have no memory unless `with_memory`."""
    decoder = _DECODER_OF_KIND.get(kind)
    if decoder is None:
        known = ", ".join(_DECODER_OF_KIND)
        raise JournalError(f"{kind!r} is not a kind of event; there are {known}.")
    try:
        found = decoder.decode(payload)
        return _decision(found, before, with_memory) if isinstance(found, _DecidedText) else _current(found)
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise JournalError(f"a {kind} event does not read as one: {error}.") from error


def _current(event: Any) -> Event:
    """The event as it is written today: older journals have a log and the kind of a note in the text."""
    if isinstance(event, JobNoted) and event.about is None:
        found = [kind for text, kind in _OLD_NOTES.items() if event.text.startswith(text)]
        event = dataclasses.replace(event, about=found[0]) if found else event
    if not isinstance(event, JobFailed | JobRetried | JobNoted) or event.log:
        return event
    name = "text" if isinstance(event, JobNoted) else "error"
    said, mark, log = getattr(event, name).rstrip().rpartition(_OLD_LOG)
    return dataclasses.replace(event, **{name: said, "log": log}) if mark and "\n" not in log else event


def _encode_decision(event: Decided, before: Before) -> str:
    change = [event.memory] if before is UNKNOWN else difference(before, event.memory)
    fields = _plain(event, dataclasses.replace(event, memory=None))
    del fields["memory"]
    if change is None:
        return _text(event, fields)
    key, value = ("memory", change[0]) if isinstance(change, list) else ("change", change)
    fields[key] = _plain(event, value)
    text = _text(event, fields)
    if json.loads(text)[key] != value:
        raise JournalError(
            f"{_name(event)} cannot be journaled: its memory would come back changed. Memory is plain JSON "
            "data. Use lists instead of tuples, text as keys, and no objects."
        )
    return text


def _decision(found: _DecidedText, before: Before, with_memory: bool) -> Decided:
    memory = None
    if with_memory:
        if found.memory is not msgspec.UNSET:
            memory = found.memory
        elif isinstance(before, Unknown):
            raise ValueError("it has the change of a memory that is not known")
        else:
            memory = changed(before, found.change)
    return Decided(
        t_s=found.t_s,
        policy=found.policy,
        instructions=found.instructions,
        reasons=found.reasons,
        memory=memory,
        wake_at_s=found.wake_at_s,
        wish=found.wish,
    )


def _text(event: Event, fields: Any) -> str:
    try:
        return _write(fields)
    except ValueError as error:
        odd = "; ".join(_non_finite(fields, "")) or str(error)
        raise JournalError(
            f"{_name(event)} cannot be journaled: {odd}. Numbers in events are finite. "
            "Leave the number out, or use null, where it is made."
        ) from error


def _plain(event: Event, value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, enc_hook=_plain_number)
    except TypeError as error:
        raise JournalError(
            f"{_name(event)} cannot be journaled: {error}. Events hold plain data. "
            "Turn the value into a number, text, list or dict where the event is made."
        ) from error


def _plain_number(value: Any) -> float:
    if isinstance(value, float):  # numpy's float64 is a float, too
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
