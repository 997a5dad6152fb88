"""Splits training state into a JSON header and a list of tensors, and back, without pickle.

The header holds the structure. Plain JSON stands for itself; everything else is an object with one key:

    null, true, 3, 0.5, "text", [..]    as in JSON
    {"dict": [[key, value], ..]}        keys may be any scalar or a tuple; so for OrderedDict and Counter
    {"tuple": [..]}, {"Size": [..]}     {"float": "nan"}        {"bytes": base64}
    {"dtype": "float32"}                {"device": "cuda:0"}    {"tensor": index in the list}
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import InputError

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_REMEDY = "Keep numbers, text, tensors, lists, tuples and dicts in the state, nothing else."

_DENSE = "Only dense tensors can be kept; keep the data that this one was made from."


@dataclass(frozen=True, slots=True)
class Packed:
    """A value as a JSON header and its tensors: contiguous, on their own devices."""

    header: bytes
    tensors: list[Tensor]


def pack(value: Any) -> Packed:
    """Pack a nested value. InputError names the path of anything that is neither data nor a tensor."""
    tree, tensors = take_apart(value)
    described = [[_name(one.dtype), list(one.shape), one.device.type == "cpu"] for one in tensors]
    return Packed(json.dumps([tree, described], separators=(",", ":")).encode(), tensors)


def unpack(header: bytes, tensors: Sequence[Tensor]) -> Any:
    """The packed value. Tensors that were on the CPU go back there, others stay where they are."""
    tree, described = json.loads(header)
    homes = [one.cpu() if on_cpu else one for one, (_, _, on_cpu) in zip(tensors, described, strict=True)]
    return put_together(tree, homes)


NOTHING = Packed(b"[null,[]]", [])
"""None, packed."""


def receive_buffers(header: bytes, device: torch.device | str, own: Packed = NOTHING) -> list[Tensor]:
    """Tensors to receive `Packed.tensors` into: new ones on `device`, or the receiver's own.

    A tensor of `own` is reused for the one at the same place in the tree, if dtype and shape match: writing
    to memory in use is faster than allocating new memory.
    """
    tree, described = json.loads(header)
    ours = {theirs: own.tensors[index] for theirs, index in _counterparts(tree, json.loads(own.header)[0])}
    places = []
    for index, (name, shape, _) in enumerate(described):
        dtype, place = getattr(torch, name), ours.get(index)
        if place is None or place.dtype != dtype or list(place.shape) != shape:
            place = torch.empty(shape, dtype=dtype, device=device)
        places.append(place)
    return places


def _counterparts(theirs: Any, ours: Any) -> Iterator[tuple[int, int]]:
    """Pairs of indices of tensors at the same place in two trees."""
    if isinstance(theirs, list) and isinstance(ours, list):
        for one, other in zip(theirs, ours, strict=False):
            yield from _counterparts(one, other)
    elif isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        ((kind, content),) = theirs.items()
        if kind == "tensor":
            yield content, ours[kind]
        elif kind in _MAPPINGS:
            by_key = {json.dumps(key): one for key, one in ours[kind]}
            for key, one in content:
                yield from _counterparts(one, by_key.get(json.dumps(key)))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat bytes, which every backend can send."""
    return tensor.reshape(-1).view(torch.uint8)


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """The structure of a value as JSON data, and its tensors, each listed once."""
    parts = _Parts()
    try:
        tree = parts.take(value, ())
    except RecursionError:
        raise InputError("the state is nested too deeply, or contains itself.", remedy=_REMEDY) from None
    return tree, parts.tensors


def put_together(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `take_apart`."""
    if isinstance(tree, list):
        return [put_together(one, tensors) for one in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind in _MAPPINGS:
        pairs = ((put_together(key, tensors), put_together(one, tensors)) for key, one in content)
        return _MAPPINGS[kind](dict(pairs))
    if kind == "tuple":
        return tuple(put_together(one, tensors) for one in content)
    return _READERS[kind](content)


class _Parts:
    """Takes a value apart, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._indices: dict[tuple[Any, ...], int] = {}
        self._alive: list[Tensor] = []
        """Keeps temporary tensors alive, so that no memory address is reused meanwhile."""

    def take(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if value is None or kind in {bool, int, str} or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._index(value, path)}
        if kind is list:
            return self._all(value, path)
        if kind is tuple:
            return {"tuple": self._all(value, path)}
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            return {kind.__name__: [self._pair(key, one, path) for key, one in value.items()]}
        return _small(value, path)

    def _all(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.take(one, (*path, index)) for index, one in enumerate(values)]

    def _pair(self, key: Any, value: Any, path: tuple[Any, ...]) -> list[Any]:
        if not _may_be_key(key):
            raise InputError(
                f"{_dotted(path)} has a key that is a {type(key).__name__}.",
                remedy="Keys are numbers, text, None or tuples of them.",
            )
        return [self.take(key, path), self.take(value, (*path, key))]

    def _index(self, tensor: Tensor, path: tuple[Any, ...]) -> int:
        bare = tensor.detach()
        if type(bare) not in {Tensor, torch.nn.Parameter} or bare.layout is not torch.strided:
            raise InputError(
                f"{_dotted(path)} is a {type(bare).__name__} of layout {bare.layout}.", remedy=_DENSE
            )
        if bare.is_quantized or bare.is_meta:
            raise InputError(f"{_dotted(path)} is a quantised tensor, or has no data.", remedy=_DENSE)
        where = bare.untyped_storage().data_ptr() or id(tensor)
        key = (bare.device, where, bare.storage_offset(), bare.shape, bare.stride(), bare.dtype)
        if key not in self._indices:
            self._indices[key] = len(self.tensors)
            self._alive += [tensor, bare]
            self.tensors.append(bare.resolve_conj().resolve_neg().contiguous())
        return self._indices[key]


def _small(value: Any, path: tuple[Any, ...]) -> Any:
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Size):
        return {"Size": list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise InputError(f"{_dotted(path)} is a {type(value).__name__}.", remedy=_REMEDY)


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "Size": torch.Size,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
}


def _may_be_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(_may_be_key(one) for one in key)
    return key is None or isinstance(key, str | int | float | np.generic)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the state"
