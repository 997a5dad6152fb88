"""What a run must carry to go on elsewhere: the state of everything prepared, its place, and its chance."""

from __future__ import annotations

import random
import sys
from typing import Any, Protocol, runtime_checkable

import torch

from stretto.core.errors import InputError


@runtime_checkable
class Stateful(Protocol):
    """Anything with the two methods that PyTorch's own objects have."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Luggage:
    """The prepared objects, in the order in which the code prepares them."""

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
        """The part of the state that is copied, never kept, by whoever loads it: that of modules."""
        states = [one.state_dict() if isinstance(one, torch.nn.Module) else None for one in self.things]
        return {"things": states}

    def names(self) -> dict[int, str]:
        """Of the modules' parameters, by id; with the module's place where there are several."""
        modules = [thing for _, thing in self._things if isinstance(thing, torch.nn.Module)]
        names: dict[int, str] = {}
        for place, module in enumerate(modules):
            whose = f"{type(module).__name__} {place}: " if len(modules) > 1 else ""
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{whose}{name}")
        return names

    def buffers(self) -> list[torch.Tensor]:
        """What modules keep beside their parameters, such as running averages; each once."""
        buffers: dict[int, torch.Tensor] = {}
        for _, thing in self._things:
            if isinstance(thing, torch.nn.Module):
                saved = thing.state_dict()  # what is not saved may differ in shape between workers
                buffers |= {id(one): one for name, one in thing.named_buffers() if name in saved}
        return list(buffers.values())

    def restore(self, state: dict[str, Any]) -> None:
        kinds = [kind for kind, _ in self._things]
        if state["kinds"] != kinds:
            raise InputError(
                f"the saved state is of {', '.join(state['kinds']) or 'nothing'}, and the code prepares "
                f"{', '.join(kinds) or 'nothing'}.",
                remedy="Prepare the same objects in the same order, or start a run of another name.",
            )
        for (kind, thing), saved in zip(self._things, state["things"], strict=True):
            try:
                thing.load_state_dict(saved)
            except (RuntimeError, ValueError, KeyError) as error:
                raise InputError(
                    f"the saved state does not fit the {kind} of this code: {error}.",
                    remedy="Prepare the same objects, or start a run of another name.",
                ) from error


def chance_state() -> dict[str, Any]:
    """The state of every generator that training code usually draws from."""
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


def restore_chance(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415

        name, keys, at, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), at, has_gauss, cached))  # noqa: NPY002


def seed_chance(seed: int) -> None:
    """Another worker, other draws."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np  # noqa: PLC0415

        np.random.seed(seed % (1 << 32))  # noqa: NPY002
