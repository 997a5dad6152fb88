"""What changed between two pieces of plain JSON data, as plain JSON data that is small where little changed.

    [value]                             it is this value now
    {"d": {key: change}, "-": [key]}    an object of which some keys changed or are new, and some are gone
    {"i": {index: change}}              a list as long as before, of which some elements changed
    {"s": [[at, gone, [values]]]}       a list in which, one after the other, elements were replaced

Order counts, also that of the keys of an object. Data is never changed in place, so that what is the very
same object is not looked into.
"""

from __future__ import annotations

from itertools import compress
from operator import is_, is_not
from typing import Any

FEW = 16
"""So many changed elements of a list are told one by one."""
_SCALARS = (str, int, float, bool, type(None))


def difference(old: Any, new: Any) -> Any:
    """What turns `old` into `new`; None if they are the same, down to the type of every number."""
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
    """The data that `difference` found the change of; shares with `old` what is as it was."""
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
        if all(map(is_, old[1:], new)):  # a window that moved on
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
    """How many elements are the same, before the first two that are not."""
    for number in compress(range(most), map(is_not, old, new)):
        if difference(old[number], new[number]) is not None:
            return number
    return most
