"""What code trains and has not prepared: nobody would average its gradients, or give it to newcomers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.core.errors import InputError
from stretto.torch.luggage import Stateful


def refuse_loose_parameters(optimizers: Sequence[Optimizer], things: Sequence[Stateful]) -> None:
    """InputError if an optimizer was prepared, and what it trains was not."""
    others = [one for one in things if not isinstance(one, Module | Optimizer | LRScheduler)]
    if any(hasattr(one, "parameters") or hasattr(one, "model") for one in others):
        return  # it may carry a model in a way of its own
    known = _parameters_of(things)
    for optimizer in optimizers:
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        if loose := [one for one in trained if id(one) not in known]:
            raise InputError(
                f"{len(loose)} of the {len(trained)} parameters of the {type(optimizer).__name__} belong to "
                "no model that was given to run.prepare(), so workers that join would not get them.",
                remedy="Prepare the model with its optimizer; put single parameters in a ParameterList.",
            )


class StepGuard:
    """Looks at whatever optimizer steps, and refuses one that trains what others must know of."""

    def __init__(
        self,
        things: Callable[[], Sequence[Stateful]],
        is_in_loop: Callable[[], bool],
    ) -> None:
        self._things = things
        self._is_in_loop = is_in_loop
        self._allowed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook: Any = None

    def begin(self) -> None:
        self._allowed.update(one for one in self._things() if isinstance(one, Optimizer))
        self._hook = register_optimizer_step_pre_hook(self._look)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _look(self, optimizer: Optimizer, _args: Any, _options: Any) -> None:
        if optimizer in self._allowed:
            return
        things = self._things()
        known = _parameters_of(things)
        trains_prepared = any(id(one) in known for group in optimizer.param_groups for one in group["params"])
        nothing_prepared = not any(isinstance(one, Module | Optimizer) for one in things)
        if trains_prepared or (nothing_prepared and self._is_in_loop()):
            what = "a prepared model" if trains_prepared else "on batches of an elastic loader"
            raise InputError(
                f"an optimizer ({type(optimizer).__name__}) trains {what} and was not given to "
                "run.prepare(), so every worker would train a model of its own.",
                remedy="Give the model and the optimizer to run.prepare().",
            )
        if not nothing_prepared:
            self._allowed.add(optimizer)


def _parameters_of(things: Sequence[Stateful]) -> set[int]:
    return {id(one) for thing in things if isinstance(thing, Module) for one in thing.parameters()}
