"""Values of the user's own that go with a run: to newcomers, and into checkpoints."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch

from stretto.core.errors import InputError, did_you_mean
from stretto.torch.pack import as_bytes, pack, put_together, take_apart

_REMEDY = (
    "Keep numbers, text, tensors, and lists, tuples and dicts of them; give whatever has state_dict() and "
    "load_state_dict() to run.prepare()."
)


class KeptValues:
    """The kept values of a run by name; all of them can be saved and loaded."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """More to keep. InputError for what cannot be kept, or is kept already."""
        for name, value in values.items():
            if name.startswith("_"):
                raise InputError(
                    f"run.keep() is given {name}, and names with a leading underscore are Python's own.",
                    remedy="Choose another name.",
                )
            if name in self._values:
                raise InputError(f"{name} is kept already.", remedy="Give run.keep() each name once.")
            _check(name, value)
        self._values.update(values)

    def get(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(f"{name} is not among the kept values. {self._known(name)}")
        return self._values[name]

    def set(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise InputError(
                f"{name} is set, and it was not given to run.keep(), so it would not be kept.",
                remedy=f"{self._known(name)} Give run.keep() a first value for each.",
            )
        _check(name, value)
        self._values[name] = value

    @property
    def values(self) -> dict[str, Any]:
        return dict(self._values)

    def state_dict(self) -> dict[str, Any]:
        """InputError for a value that was changed in place to one that cannot be saved."""
        for name, value in self._values.items():
            _check(name, value)
        return dict(self._values)

    def digest(self) -> int:
        """Another number for other values."""
        return _digest(self.state_dict())

    def take(self, leaders: Mapping[str, Any]) -> None:
        """Have the values of the worker that leads; those that are equal stay the same objects."""
        for name, value in leaders.items():
            if name in self._values and _digest(value) != _digest(self._values[name]):
                self._values[name] = value

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take up saved values; returns what a reader should know about names that do not match."""
        notes = []
        if unknown := sorted(saved.keys() - self._values.keys()):
            notes.append(f"The saved state has {', '.join(unknown)}, which this code does not keep.")
        if new := sorted(self._values.keys() - saved.keys()):
            notes.append(f"The saved state has no {', '.join(new)}: begun with what run.keep() was given.")
        self._values.update({name: value for name, value in saved.items() if name in self._values})
        return notes

    def _known(self, name: str) -> str:
        if not self._values:
            return "There are none."
        return f"{did_you_mean(name, self._values)}There are {', '.join(self._values)}."


class Kept:
    """What `run.keep` returns: its attributes are the kept values, and no others can be set."""

    _kept: KeptValues

    def __init__(self, kept: KeptValues) -> None:
        object.__setattr__(self, "_kept", kept)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by whoever copies or prints objects
            raise AttributeError(name)
        return self._kept.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._kept.set(name, value)

    def __repr__(self) -> str:
        values = self._kept.values.items()
        return f"Kept({', '.join(f'{name}={value!r}' for name, value in values)})"


def _digest(value: Any) -> int:
    packed = pack(value)
    digest = hashlib.blake2b(packed.header, digest_size=7)
    for tensor in packed.tensors:
        digest.update(as_bytes(tensor.detach()).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest())


def _check(name: str, value: object) -> None:
    """InputError unless a checkpoint can hold the value and give it back."""
    if value is None or type(value) in {bool, float} or (type(value) is int and value.bit_length() < 64):
        return
    try:
        pack(value)
        tree, tensors = take_apart(value)
        file = io.BytesIO()
        torch.save(put_together(tree, [torch.empty(0) for _ in tensors]), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        why = error.problem if isinstance(error, InputError) else str(error).partition("\n")[0]
        inside = "" if why.startswith("the state is a ") else f" ({why.rstrip('.')})"
        raise InputError(
            f"{name} is of type {type(value).__name__}, which a checkpoint cannot hold{inside}.",
            remedy=_REMEDY,
        ) from error
