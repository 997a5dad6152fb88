"""The state in checkpoints, also sent to new workers: prepared objects, kept values, random generators."""

from __future__ import annotations

import hashlib
import io
import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from stretto.core.errors import InputError, did_you_mean
from stretto.torch.pack import as_bytes, pack, put_together, take_apart


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`, as PyTorch's own have."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class PreparedObjects:
    """The prepared objects, in the order of preparation."""

    def __init__(self) -> None:
        self._things: list[tuple[str, Stateful]] = []

    def __bool__(self) -> bool:
        return bool(self._things)

    @property
    def things(self) -> list[Stateful]:
        return [thing for _, thing in self._things]

    def add(self, thing: Stateful) -> None:
        self._things.append((type(thing).__name__, thing))

    def state(self) -> dict[str, Any]:
        return {
            "kinds": [kind for kind, _ in self._things],
            "things": [thing.state_dict() for _, thing in self._things],
        }

    def modules(self) -> dict[str, Any]:
        """The state of modules, which `load_state_dict` copies, so that it can be received in place."""
        states = [one.state_dict() if isinstance(one, torch.nn.Module) else None for one in self.things]
        return {"things": states}

    def names(self) -> dict[int, str]:
        """Names of the modules' parameters, by id; with the module's number if there are several."""
        modules = [thing for _, thing in self._things if isinstance(thing, torch.nn.Module)]
        names: dict[int, str] = {}
        for place, module in enumerate(modules):
            whose = f"{type(module).__name__} {place}: " if len(modules) > 1 else ""
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{whose}{name}")
        return names

    def buffers(self) -> list[torch.Tensor]:
        """The saved buffers of all modules, such as running averages; each once."""
        buffers: dict[int, torch.Tensor] = {}
        for _, thing in self._things:
            if isinstance(thing, torch.nn.Module):
                saved = thing.state_dict()  # unsaved buffers may differ in shape between workers
                buffers |= {id(one): one for name, one in thing.named_buffers() if name in saved}
        return list(buffers.values())

    def restore(self, state: dict[str, Any]) -> None:
        kinds = [kind for kind, _ in self._things]
        if state["kinds"] != kinds:
            raise InputError(
                f"the saved state is of {', '.join(state['kinds']) or 'nothing'}, but the code prepares "
                f"{', '.join(kinds) or 'nothing'}.",
                remedy="Prepare the same objects in the same order, or start a run with another name.",
            )
        for (kind, thing), saved in zip(self._things, state["things"], strict=True):
            try:
                thing.load_state_dict(saved)
            except (RuntimeError, ValueError, KeyError) as error:
                raise InputError(
                    f"the saved state does not fit the {kind} of this code: {error}.",
                    remedy="Prepare the same objects, or start a run with another name.",
                ) from error


def rng_state() -> dict[str, Any]:
    """The state of the global random generators of torch, Python and numpy."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        import numpy as np  # noqa: PLC0415

        name, keys, at, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
        state["numpy"] = [str(name), torch.tensor(np.asarray(keys, dtype=np.int64)), at, has_gauss, cached]
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415

        name, keys, at, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), at, has_gauss, cached))  # noqa: NPY002


def seed_rngs(seed: int) -> None:
    """Seed the global random generators, differently in every worker."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np  # noqa: PLC0415

        np.random.seed(seed % (1 << 32))  # noqa: NPY002


_REMEDY = (
    "Keep numbers, text, tensors, and lists, tuples and dicts of them. Give objects with state_dict() and "
    "load_state_dict() to run.prepare()."
)


class KeptValues:
    """The values given to `run.keep`, by name. All can be saved in a checkpoint."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values. InputError if one cannot be saved, or its name is taken."""
        for name, value in values.items():
            if name.startswith("_"):
                raise InputError(
                    f"run.keep() is given {name}, but names with a leading underscore are reserved.",
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
                f"{name} was not given to run.keep(), so it would not be saved.",
                remedy=f"{self._known(name)} Give run.keep() an initial value for each.",
            )
        _check(name, value)
        self._values[name] = value

    @property
    def values(self) -> dict[str, Any]:
        return dict(self._values)

    def state_dict(self) -> dict[str, Any]:
        """All values. InputError if one was changed in place so that it cannot be saved."""
        for name, value in self._values.items():
            _check(name, value)
        return dict(self._values)

    def digest(self) -> int:
        """A hash of all values."""
        return _digest(self.state_dict())

    def take(self, leaders: Mapping[str, Any]) -> None:
        """Copy rank 0's values; equal values stay the same objects."""
        for name, value in leaders.items():
            if name in self._values and _digest(value) != _digest(self._values[name]):
                self._values[name] = value

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Load saved values; returns notes about names that do not match."""
        notes = []
        if unknown := sorted(saved.keys() - self._values.keys()):
            notes.append(f"The saved state has {', '.join(unknown)}, which this code does not keep.")
        if new := sorted(self._values.keys() - saved.keys()):
            notes.append(f"The saved state has no {', '.join(new)}: the initial value is used.")
        self._values.update({name: value for name, value in saved.items() if name in self._values})
        return notes

    def _known(self, name: str) -> str:
        if not self._values:
            return "There are none."
        return f"{did_you_mean(name, self._values)}There are {', '.join(self._values)}."


class KeptAttributes:
    """Returned by `run.keep`: its attributes are the kept values; others cannot be set."""

    _kept: KeptValues

    def __init__(self, kept: KeptValues) -> None:
        object.__setattr__(self, "_kept", kept)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look for such names
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
    """InputError unless a checkpoint can store and restore the value."""
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
