"""Patches an optimizer: it steps only when a step is complete, with a learning rate that fits the batch."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stretto.core.errors import InputError
from stretto.core.observations import NoiseSample
from stretto.torch.group import Group
from stretto.torch.noise import NoiseEstimator
from stretto.torch.reduce import Reducer
from stretto.torch.rules import Rule, lr_factor
from stretto.torch.step_layout import UNSHARED, CurrentStep
from stretto.torch.timing import SplitCost


class Stepper:
    """Patches `optimizer.step` so that it does nothing before the last pass of a step.

    The optimizer stays the user's object. After `adapt`, its gradient noise is measured, and during a step
    its learning rates are multiplied by the rule's factor.
    """

    def __init__(
        self, optimizer: Optimizer, current: CurrentStep, group: Group, *, is_first: bool = True
    ) -> None:
        self.optimizer = optimizer
        self._is_first = is_first
        self._current = current
        self._group = group
        self.noise: NoiseEstimator | None = None
        self._rule: Rule = "auto"
        self._initial_batch = 0
        self._scaler: Any = None
        self._split_cost = SplitCost()
        self._split_steps: float | None = None
        """The cost of splitting a step, in plain steps; cached, as every step reads it."""
        self.reducer = Reducer(self.parameters, current, group)
        self._step = optimizer.step
        self._is_released = False
        self.waits = False
        """Whether there are gradients for a later step: accumulated by hand."""
        self._watches_rates = False
        self._rates: list[float] | None = None
        """Learning rates at the loop's last step, in an adaptive loop."""
        self._schedule_uses = 0
        self._probed: list[torch.nn.Parameter] = []
        self._seen: list[tuple[int, int] | None] | None = []
        """Versions of the probed gradients after the last batch; None if that was a step."""
        self._at_step: tuple[int, int] | None = None
        """Version of the first probed gradient after the last step."""
        self._refusals: list[Any] = []
        """Hooks that refuse additions to the gradients of a batch without a step."""

        @functools.wraps(self._step)
        def step(_: Optimizer, *args: Any, **options: Any) -> Any:
            return self._patched(*args, **options)

        # Must be a bound method: schedulers look for its __func__.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for settings in self.optimizer.param_groups for parameter in settings["params"]]

    def adapt(self, initial_batch: int, rule: Rule, scaler: Any) -> None:
        """Measure gradient noise, and let learning rates follow the batch size by `rule`."""
        self._initial_batch, self._rule, self._scaler = initial_batch, rule, scaler
        self.noise = NoiseEstimator(self.optimizer, initial_batch)
        self.reducer.watch(self)

    def begin_loop(self, *, adapts: bool) -> None:
        """A loop begins, so existing gradients are not from it. `adapts`: its batch size may change."""
        self.allow_adding()
        self._rates, self._watches_rates = None, adapts
        trained = [one for one in self.parameters() if one.requires_grad]
        self._probed = [*trained[:2], *trained[2:][-2:]]
        self._seen = self._probe()

    def stepped(self) -> None:
        """A batch is done in which the optimizer stepped."""
        self.waits = False
        self._at_step = _version_of(self._probed[0].grad) if self._probed else None
        self._seen = None
        if self._refusals:
            self.allow_adding()

    def passed(self) -> bool:
        """A batch is done in which the optimizer did not step; True if it left gradients for a later step."""
        self.allow_adding()
        before, self._seen = self._seen, self._probe()
        came = any(one is not None for one in self._seen)
        if before is not None:
            came &= self._seen != before
        elif self._seen and self._seen[0] is not None:
            came &= self._seen[0] != self._at_step
        self.waits |= came
        return came

    def refuse_adding(self, refuse: Callable[[], None]) -> None:
        """Call `refuse` if the next gradients are added to those of the finished batch.

        A skipped batch leaves gradients, too, but the code drops or zeroes them before the next `backward()`.
        """

        def look(parameter: torch.nn.Parameter, left: tuple[int, int] | None, _: Tensor) -> None:
            there = parameter.grad
            if there is not None and (_version_of(there) == left or bool(there.any())):
                refuse()

        self.allow_adding()
        for parameter, left in zip(self._probed, self._probe(), strict=True):
            if parameter.requires_grad:
                hook = functools.partial(look, parameter, left)
                self._refusals.append(parameter.register_hook(hook))

    def allow_adding(self) -> None:
        for hook in self._refusals:
            hook.remove()
        self._refusals = []

    def _probe(self) -> list[tuple[int, int] | None]:
        """Versions of the gradients of a few parameters; they change whenever a gradient is added."""
        return [_version_of(parameter.grad) for parameter in self._probed]

    def gradients(self) -> dict[int, Tensor] | None:
        """Gradients for a later step, by the places of their parameters; None if there are none."""
        if not self.waits:
            return None
        return {place: one.grad for place, one in enumerate(self.parameters()) if one.grad is not None}

    def take_gradients(self, saved: dict[int, Tensor] | None) -> None:
        self.waits = saved is not None
        parameters = self.parameters()
        for place, gradient in (saved or {}).items():
            parameters[place].grad = gradient.to(parameters[place].device, copy=True)

    def sample(self) -> NoiseSample | None:
        """The noise estimate for batch sizes and learning rates."""
        return None if self.noise is None else self.noise.cautious()

    def skip(self) -> None:
        """Do not time the next step."""
        self._split_cost.skip()

    def release(self) -> None:
        """Restore the optimizer's ordinary behaviour."""
        self._is_released = True
        self.allow_adding()
        self.reducer.release()

    def _patched(self, *args: Any, **options: Any) -> Any:
        if self._is_released:
            return self._step(*args, **options)
        if self._current.refusal is not None:  # the code caught the first one
            raise self._current.refusal
        closure, *_ = (*args, options.pop("closure", None))
        if closure is not None:
            raise InputError(
                "step() of the optimizer was called with a closure, which elastic training does not support.",
                remedy="Call backward() and then step() without arguments.",
            )
        self._current.stepped_ids.add(id(self.optimizer))
        if self._current.share.last:
            self.reducer.catch_up()
        self.reducer.stepped()
        if not self._current.share.last:
            return None
        if self._watches_rates:
            self._refuse_other_schedules()
        self._count()
        if self.noise is None:
            return self._step(**options)
        try:
            return self._scaled_step(self._factor(), options)
        finally:
            self._end_step(self.noise)

    def _refuse_other_schedules(self) -> None:
        """InputError if rates change between steps, and not by a prepared scheduler or run.progress."""
        now = [float(one["lr"]) for one in self.optimizer.param_groups if not isinstance(one["lr"], Tensor)]
        before, self._rates = self._rates, now
        followed, self._schedule_uses = (
            self._schedule_uses != self._current.schedule_uses,
            self._current.schedule_uses,
        )
        if before is None or len(before) != len(now):  # add_param_group
            return
        if before != now and not followed:
            raise InputError(
                f"the learning rate changes from {before[0]:.6g} to {now[0]:.6g} between two steps of a loop "
                "with adaptive=True, but not by a scheduler that was given to run.prepare. Larger batches "
                "mean fewer steps, so a schedule that counts steps would never end.",
                remedy="Give the scheduler to run.prepare, which then advances it by the work done; compute "
                "rates from run.progress; change them once per epoch; or leave out adaptive=True.",
            )

    def _count(self) -> None:
        """Count a step. Outside elastic loops, only the first optimizer's steps count."""
        if self._current.share is not UNSHARED:
            self._current.is_updated = True
        elif self._is_first:
            self._current.updates += 1

    def _scaled_step(self, factor: float, options: dict[str, Any]) -> Any:
        if factor == 1.0:
            return self._step(**options)
        before = [settings["lr"] for settings in self.optimizer.param_groups]
        try:
            for settings, lr in zip(self.optimizer.param_groups, before, strict=True):
                settings["lr"] = lr * factor  # not in place: a rate may be a tensor
            return self._step(**options)
        finally:
            for settings, lr in zip(self.optimizer.param_groups, before, strict=True):
                settings["lr"] = lr

    def _end_step(self, noise: NoiseEstimator) -> None:
        current = self._current
        noise.read(current.step)
        split = self._is_split
        if current.share.step_examples < current.base.total:
            self._split_cost.skip()
        elif current.base.parts == 1 and (
            split or self.splits(current.step + 1) or self.splits(current.step + 2)
        ):
            self._split_cost.boundary(current.step, current.base.total, split=split)
            self._split_steps = self._split_cost.in_steps

    def _factor(self) -> float:
        """The factor of learning rates for this step.

        The last step of a pass may have few examples, too few for the rate of a large batch. Its factor is at
        least 1, if the batch is not below the initial one.
        """
        current = self._current
        examples = current.layout.total
        if current.share is not UNSHARED:
            examples = max(current.share.step_examples, min(examples, self._initial_batch))
        if examples == self._initial_batch:
            return 1.0  # the same in all rules
        return lr_factor(self._rule, self.optimizer, self.sample(), examples / self._initial_batch)

    def splits(self, step: int) -> bool:
        """Whether a single worker should split this step in two passes, to measure noise without bias."""
        initial = self._current.base.total == self._initial_batch
        return self.noise is not None and self.noise.splits(step, self._split_steps, initial=initial)

    @property
    def _is_split(self) -> bool:
        return self._current.layout.passes > self._current.base.passes

    def _loss_scale(self) -> float | Tensor:
        """The scaler's current scale, left on the GPU: `get_scale` would wait for it."""
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        there: Tensor | None = self._scaler._scale  # noqa: SLF001
        return 1.0 if there is None else there

    def wants(self) -> bool:
        current = self._current
        if (
            self.noise is None
            or current.layout.parts == 1
            or current.share.step_examples != current.layout.total
        ):
            return False
        return self._is_split or self.noise.compares(current.step)

    def part(self, gradients: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]) -> None:
        assert self.noise is not None
        if self._current.layout.workers == 1:
            self.noise.first_pass(gradients, parameters, times=self._current.layout.passes)
        else:
            self.noise.part(gradients, parameters)

    def whole(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        assert self.noise is not None
        layout = self._current.layout
        alone = layout.workers == 1
        self.noise.total(
            parameters,
            step=self._current.step,
            batch=layout.total,
            part_batch=layout.total / (layout.passes if alone else layout.workers),
            parts=layout.workers,
            part_sqr=None if alone else self._group.sum(self.noise.part_sum().clone()),
            loss_scale=self._loss_scale(),
        )


def _version_of(gradient: Tensor | None) -> tuple[int, int] | None:
    """A value that changes when this gradient is replaced or added to."""
    return None if gradient is None else (id(gradient), gradient._version)  # noqa: SLF001


def advance_by_work(scheduler: Any, current: CurrentStep, steps: Callable[[], int | None]) -> None:
    """Make a scheduler advance once per step, or, in an adaptive loop, by the step's worth.

    `steps()` returns how many steps at the initial batch the current one replaces; None outside such a loop.
    """
    kind = type(scheduler)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **options: Any) -> None:
        current.schedule_uses += 1
        if not current.share.last:
            return
        count = steps()
        if count is None or issubclass(kind, ReduceLROnPlateau):
            kind.step(self, *args, **options)
            return
        if args or options:
            raise InputError(
                f"step() of the {kind.__name__} was called with arguments in a loop with adaptive=True, "
                "whose number of steps is not known in advance.",
                remedy="Call step() without arguments: it advances by the work done.",
            )
        left = getattr(self, "total_steps", math.inf) - self.last_epoch  # OneCycleLR raises beyond its end
        for _ in range(int(min(count, left))):
            kind.step(self)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


def skip_before_step_end(thing: Any, methods: Sequence[str], current: CurrentStep) -> None:
    """Make some methods of an object do nothing before the last pass of a step.

    We replace the class, not attributes: attributes of a scheduler are part of its saved state.
    """
    kind = type(thing)

    def quiet(name: str) -> Any:
        method = getattr(kind, name)

        @functools.wraps(method)
        def patched(*args: Any, **options: Any) -> Any:
            optimizers = [one for one in args[1:] if isinstance(one, Optimizer)] if name == "step" else []
            current.stepped_ids.update(map(id, optimizers))  # also if a scaler skips the step
            if current.share.last:
                return method(*args, **options)
            for optimizer in optimizers:  # the patched step() only records the call
                optimizer.step()
            return None

        return patched

    thing.__class__ = type(kind.__name__, (kind,), {name: quiet(name) for name in methods})
