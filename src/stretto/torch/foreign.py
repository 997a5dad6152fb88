"""Other tools for distributed training in the user's code, and models that were not prepared.

DistributedDataParallel would average gradients a second time, and DistributedSampler would split the data a
second time. We remove such wrappers with a notice. What cannot be removed is refused before training begins.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from stretto.core.errors import InputError
from stretto.torch.state import Stateful

Note = Callable[[str], None]

init_process_group = dist.init_process_group
"""Torch's own function, even after `refuse_own_groups` has replaced it for training code."""

_AS_COMMAND = "run it as a command (`stretto run -- torchrun ...`), which Stretto starts and stops as a whole"


def refuse_own_groups() -> None:
    """Forbid `init_process_group` in training code of this process: Stretto forms the groups."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise InputError(
            "the training code calls torch.distributed.init_process_group, but Stretto forms the group of "
            "workers itself, anew whenever their number changes.",
            remedy="Leave out the call and DistributedDataParallel: run.prepare averages gradients, and "
            f"run.rank and run.workers describe the group; or {_AS_COMMAND}.",
        )

    for name in ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh"):
        if name in sys.modules:
            sys.modules[name].init_process_group = refused  # type: ignore[attr-defined]


def refuse_users_group() -> None:
    """InputError if training code made a process group nevertheless."""
    if dist.is_initialized():
        raise InputError(
            "the training code has made its own process group, but Stretto forms the group of workers "
            "itself, anew whenever their number changes.",
            remedy=f"Leave out init_process_group; or {_AS_COMMAND}.",
        )


def unwrapped_module(module: torch.nn.Module, note: Note, *, alone: bool) -> torch.nn.Module:
    """The module inside DistributedDataParallel or DataParallel; InputError for a sharded model."""
    _refuse_sharded(module)
    if isinstance(module, DistributedDataParallel):
        wrapper, module = module, module.module
        note(
            f"the model was wrapped in DistributedDataParallel, which would average gradients a second time: "
            f"prepare() returns the {type(module).__name__} inside. Call that one."
        )
        wrapper.register_forward_pre_hook(_refuse_call)
    elif isinstance(module, DataParallel) and not alone:
        module = module.module
        note(
            f"the model was wrapped in DataParallel, but a worker computes on one device: prepare() returns "
            f"the {type(module).__name__} inside."
        )
    _refuse_wrapped_inside(module)
    _refuse_odd(module.named_parameters(), f"the {type(module).__name__}")
    _refuse_odd(module.named_buffers(), f"the {type(module).__name__}")
    return module


def check_optimizer(optimizer: Optimizer) -> None:
    """InputError if it trains parameters that cannot be averaged or sent to other workers."""
    parameters = [one for settings in optimizer.param_groups for one in settings["params"]]
    _refuse_odd(((str(place), one) for place, one in enumerate(parameters)), "the optimizer's parameter")


def refuse_wrappers_of(parameters: Iterable[Tensor], objects: Callable[[], list[Any]]) -> None:
    """InputError if an unprepared DistributedDataParallel contains any of these parameters."""
    trained = {id(one) for one in parameters}
    for wrapper in objects():
        if not issubclass(type(wrapper), DistributedDataParallel):
            continue
        if _refuse_call in wrapper._forward_pre_hooks.values():  # noqa: SLF001
            continue
        if any(id(one) in trained for one in wrapper.parameters()):
            raise InputError(
                "a prepared optimizer trains a model in DistributedDataParallel that was not prepared, so "
                "gradients would be averaged twice.",
                remedy="Give the model to run.prepare and call what it returns, or leave the wrapper out.",
            )


def _refuse_call(module: torch.nn.Module, _: object) -> NoReturn:
    raise InputError(
        f"the {type(module).__name__} that was given to run.prepare is still called, but it would average "
        "gradients a second time.",
        remedy="Call the model that run.prepare returns: model, ... = run.prepare(model, ...).",
    )


def _refuse_wrapped_inside(module: torch.nn.Module) -> None:
    for name, one in module.named_modules():
        if isinstance(one, DistributedDataParallel):
            raise InputError(
                f"{name or 'the model'} of the {type(module).__name__} is wrapped in "
                "DistributedDataParallel, which would average its gradients a second time.",
                remedy="Leave out the wrapper: run.prepare averages gradients.",
            )


def _refuse_sharded(module: torch.nn.Module) -> None:
    for one in module.modules():
        kinds = {kind.__name__ for kind in type(one).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise InputError(
                f"the {type(module).__name__} is sharded by FSDP, but shards cannot be moved to a group of "
                "another size during training.",
                remedy=f"Leave out FSDP if the model fits one device; else {_AS_COMMAND}.",
            )


def _refuse_odd(named: Iterable[tuple[str, Tensor]], owner: str) -> None:
    """Refuse tensors that cannot be saved or sent to a new worker, now and not at the first resize."""
    for name, one in named:
        if torch.nn.parameter.is_lazy(one):
            continue
        kind = type(one.detach())
        if kind.__name__ == "DTensor":
            raise InputError(
                f"{owner} {name} is a DTensor, a shard of a parameter, but shards cannot be moved to a group "
                "of another size during training.",
                remedy=f"Leave out FSDP and tensor parallelism if the model fits one device; else "
                f"{_AS_COMMAND}.",
            )
        if kind not in {Tensor, torch.nn.Parameter} or one.layout is not torch.strided or one.is_meta:
            what = "meta tensor without data" if one.is_meta else f"{kind.__name__} of layout {one.layout}"
            raise InputError(
                f"{owner} {name} is a {what}, which cannot be sent to other workers.",
                remedy=f"Use ordinary dense parameters; or {_AS_COMMAND}.",
            )


def whole_sampler(sampler: Any, note: Note) -> Any:
    """A sampler over all examples, in place of one that gives each worker a part."""
    replicas = getattr(sampler, "num_replicas", 1)
    if not isinstance(replicas, int) or replicas <= 1:
        return sampler
    if type(sampler) is not DistributedSampler:
        raise InputError(
            f"the {type(sampler).__name__} gives each of {replicas} workers a part of the data, but the "
            "elastic loader splits the data itself.",
            remedy="Give a sampler over all examples: the one inside, or shuffle=True.",
        )
    note(
        f"the DistributedSampler's {replicas} parts are put together again: the elastic loader splits the "
        "data over workers itself, and its batch_size is the total over all workers."
    )
    return DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )


def refuse_loose_parameters(optimizers: Sequence[Optimizer], things: Sequence[Stateful]) -> None:
    """InputError if a prepared optimizer trains parameters of no prepared model."""
    others = [one for one in things if not isinstance(one, Module | Optimizer | LRScheduler)]
    if any(hasattr(one, "parameters") or hasattr(one, "model") for one in others):
        return  # it may contain the model
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
    """Checks every optimizer that steps, and refuses unprepared ones that train a prepared model."""

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
                f"an optimizer ({type(optimizer).__name__}) trains {what} but was not given to "
                "run.prepare(), so every worker would train a different model.",
                remedy="Give the model and the optimizer to run.prepare().",
            )
        if not nothing_prepared:
            self._allowed.add(optimizer)


def _parameters_of(things: Sequence[Stateful]) -> set[int]:
    return {id(one) for thing in things if isinstance(thing, Module) for one in thing.parameters()}
