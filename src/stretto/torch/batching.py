"""How large a step is: fixed by the user, ordered by a controller, or tuned by the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.torch.adaptive import BatchChange, BatchTuner
from stretto.torch.data import DataSource
from stretto.torch.group import Group
from stretto.torch.rules import progress_of_step
from stretto.torch.step_layout import StepLayout

_DEFAULT_GROWTH = 16
"""Without max_batch_size, an adaptive batch grows to at most this many times the initial one."""


@dataclass(frozen=True, slots=True)
class _OwnBatch:
    """The batch that an adaptive run chose itself; it stays valid when the group changes."""

    total: int
    atomic: int
    """Examples per worker and pass at that time: known to fit in memory."""


class Batching:
    """The batch size of a run."""

    def __init__(self) -> None:
        self.adaptive = False
        self.order: BatchChoice | None = None
        """The controller's choice for the current group."""
        self.counted: DataSource | None = None
        """The data source whose batch adapts: the first one prepared with adaptive=True."""
        self._own: _OwnBatch | None = None
        self._max: int | None = None
        self._per_worker: tuple[int, int] | None = None
        self._accumulates = True
        self._source: DataSource | None = None
        self._adapts = False
        """Whether the current loop's batch adapts."""
        self._expected: DataSource | None = None
        """The first prepared source; used until a loop begins."""
        self._tuner: BatchTuner | None = None

    def bound(
        self, *, adaptive: bool, most: int | None, per_worker: tuple[int, int] | None, accumulates: bool
    ) -> None:
        """Set the user's limits. Limits of an earlier call stay unless they are given again."""
        given: object = most
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise InputError(f"max_batch_size is {given!r}.", remedy="Give a whole number from 1 up.")
        if per_worker is not None and not 1 <= per_worker[0] <= per_worker[1]:
            raise InputError(
                f"per_worker_batch is {per_worker}.", remedy="Give the smallest and the largest: (16, 256)."
            )
        self.adaptive = self.adaptive or adaptive
        if most is not None and not self.adaptive:
            raise InputError(
                "max_batch_size is given for a batch that does not change.", remedy="Set adaptive=True."
            )
        self._max = self._max if most is None else most
        self._per_worker = self._per_worker if per_worker is None else per_worker
        self._accumulates = self._accumulates and accumulates

    def expect(self, source: DataSource) -> None:
        """Register a prepared source. InputError if it contradicts the limits."""
        if self.adaptive and self.counted is None:
            self.counted = source
        self.limits(source)
        self._expected = self._expected or source

    def use(self, source: DataSource, *, adapts: bool) -> None:
        """A loop over this source begins; `adapts` says whether its batch size may change."""
        self._source, self._adapts = source, adapts
        if adapts and self._tuner is None:
            self._tuner = BatchTuner(self.limits(source))

    def limits(self, source: DataSource) -> BatchLimits:
        """The limits of the batch size. In an adaptive run, all but one source keep their own batch size."""
        initial = source.batch_size
        if self.adaptive and source is not self.counted:
            most, low = initial, 1
        else:
            most, low = self._most(initial), self._per_worker[0] if self._per_worker else 1
        if most < initial:
            raise InputError(
                f"max_batch_size {most} is below the batch size {initial}.",
                remedy="Raise one or lower the other.",
            )
        if low > initial:
            raise InputError(
                f"per_worker_batch begins at {low}, above the batch size {initial}.",
                remedy="Raise one or lower the other.",
            )
        most = max(min(most, source.examples // 2), initial)  # else an epoch might have no full step
        return BatchLimits(
            initial=initial,
            requested=initial,
            max=most,
            per_gpu_min=low,
            per_gpu_max=self._per_worker[1] if self._per_worker else most,
            accumulation=self._accumulates,
        )

    def _most(self, initial: int) -> int:
        if not self.adaptive:
            return initial
        return initial * _DEFAULT_GROWTH if self._max is None else self._max

    def choose(self, choice: BatchChoice, workers: int) -> None:
        """Use another batch in the current group of `workers` workers."""
        if self.order is None:
            self._own = _OwnBatch(choice.total(workers), choice.atomic)
        else:
            self.order = choice

    def layout(self, group: Group) -> StepLayout:
        """How the current group splits a step."""
        source = self._source or self.counted or self._expected
        if source is None:
            return StepLayout(total=1, workers=group.world, rank=group.rank)
        adapts = self._adapts or (self._source is None and self.counted is not None)
        return self._layout_of(source, group, adapts=adapts)

    def usual(self, source: DataSource, group: Group) -> StepLayout:
        """How the current group would split the steps of a loop over this source."""
        return self._layout_of(source, group, adapts=source is self.counted)

    def splits_alone(self, source: DataSource) -> bool:
        """Whether a single worker would need several passes for a batch of this source."""
        limits = self.limits(source)
        return self._accumulates and limits.initial > limits.per_gpu_max

    def _layout_of(self, source: DataSource, group: Group, *, adapts: bool) -> StepLayout:
        limits = self.limits(source)
        total, passes = limits.initial, 1
        if adapts and self.order is not None:
            total, passes = self.order.total(group.world), self.order.accumulation + 1
        elif adapts and self._own is not None:
            total, passes = self._own_split(self._own, limits, group.world)
        elif self.order is not None and not self.adaptive:
            passes = self.order.accumulation + 1
        if self._accumulates:
            passes = max(passes, ceil(total / group.world / limits.per_gpu_max))
        return StepLayout(total=total, workers=group.world, passes=passes, rank=group.rank)

    @staticmethod
    def _own_split(own: _OwnBatch, limits: BatchLimits, workers: int) -> tuple[int, int]:
        """The total batch, kept if possible, and the passes, so that each pass is known to fit."""
        fits = max(own.atomic, ceil(limits.initial / workers))
        most = limits.max if limits.accumulation else min(limits.max, fits * workers)
        total = max(min(own.total, most), limits.initial)
        return total, ceil(total / workers / fits)

    def worth(self, noise: NoiseSample | None, examples: int) -> float:
        """How many steps at the initial batch one step of `examples` examples is worth."""
        assert self._source is not None
        return progress_of_step(noise, examples / self._source.batch_size)

    def observe(self, speeds: tuple[SpeedSample, ...]) -> None:
        if self._tuner is not None:
            self._tuner.observe(speeds)

    def is_due(self, step: int) -> bool:
        """Whether it is time to search for a better batch size."""
        return self._tuner is not None and self._adapts and self._tuner.is_due(step)

    def tune(self, group: Group, noise: NoiseSample | None, step: int) -> BatchChange | None:
        """A better batch size for the current group, or None."""
        if self._tuner is None or not self.is_due(step):
            return None
        layout = self.layout(group)
        current = BatchChoice(layout.atomic, layout.passes - 1)
        return self._tuner.propose(noise, nodes=group.nodes, workers=group.world, current=current, step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"own": None if self._own is None else [self._own.total, self._own.atomic]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own = None if state["own"] is None else _OwnBatch(*state["own"])
