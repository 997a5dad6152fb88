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
"""Without a bound of the user's, an adaptive batch grows to so many times the initial one."""


@dataclass(frozen=True, slots=True)
class _OwnBatch:
    """What an adaptive run chose itself, for whatever group there will be."""

    total: int
    atomic: int
    """What a worker was to take at once: so much surely fits."""


class Batching:
    """The batch size of a run."""

    def __init__(self) -> None:
        self.adaptive = False
        self.order: BatchChoice | None = None
        """A controller's choice for the group as it is."""
        self.counted: DataSource | None = None
        """The data whose loops have a batch that adapts: the first prepared together with adaptive=True."""
        self._own: _OwnBatch | None = None
        self._max: int | None = None
        self._per_worker: tuple[int, int] | None = None
        self._accumulates = True
        self._source: DataSource | None = None
        self._adapts = False
        """Whether the loop that goes on has a batch that adapts."""
        self._expected: DataSource | None = None
        """The first loader there is, before any was looped over."""
        self._tuner: BatchTuner | None = None

    def bound(
        self, *, adaptive: bool, most: int | None, per_worker: tuple[int, int] | None, accumulates: bool
    ) -> None:
        """What the user allows; what an earlier call allowed stays unless it is said anew."""
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
        """A loader to come. InputError if it does not agree with the bounds."""
        if self.adaptive and self.counted is None:
            self.counted = source
        self.limits(source)
        self._expected = self._expected or source

    def use(self, source: DataSource, *, adapts: bool) -> None:
        """The loader whose steps come next, with its own batch size or one that adapts."""
        self._source, self._adapts = source, adapts
        if adapts and self._tuner is None:
            self._tuner = BatchTuner(self.limits(source))

    def limits(self, source: DataSource) -> BatchLimits:
        """What the batch may be. Of an adaptive run's other loaders, it is what they were given."""
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
        most = max(min(most, source.examples // 2), initial)  # or no step of a pass might be a full one
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
        """Another batch for the group as it is, of so many workers."""
        if self.order is None:
            self._own = _OwnBatch(choice.total(workers), choice.atomic)
        else:
            self.order = choice

    def layout(self, group: Group) -> StepLayout:
        """How the group as it is shares out a step."""
        source = self._source or self.counted or self._expected
        if source is None:
            return StepLayout(total=1, workers=group.world, rank=group.rank)
        adapts = self._adapts or (self._source is None and self.counted is not None)
        return self._layout_of(source, group, adapts=adapts)

    def usual(self, source: DataSource, group: Group) -> StepLayout:
        """How the group as it is would share out the steps of a loop over this."""
        return self._layout_of(source, group, adapts=source is self.counted)

    def splits_alone(self, source: DataSource) -> bool:
        """Whether one worker alone would make a batch of this, as the user gave it, in several passes."""
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
        """The total and the passes. The total stays, and no worker takes more at once than surely fits."""
        fits = max(own.atomic, ceil(limits.initial / workers))
        most = limits.max if limits.accumulation else min(limits.max, fits * workers)
        total = max(min(own.total, most), limits.initial)
        return total, ceil(total / workers / fits)

    def worth(self, noise: NoiseSample | None, examples: int) -> float:
        """Steps at the initial batch that one step of so many examples is worth."""
        assert self._source is not None
        return progress_of_step(noise, examples / self._source.batch_size)

    def saw(self, speeds: tuple[SpeedSample, ...]) -> None:
        if self._tuner is not None:
            self._tuner.saw(speeds)

    def is_due(self, step: int) -> bool:
        """Whether it is time to look for a better batch size."""
        return self._tuner is not None and self._adapts and self._tuner.is_due(step)

    def tune(self, group: Group, noise: NoiseSample | None, step: int) -> BatchChange | None:
        """A better batch size for the group as it is, if there is one."""
        if self._tuner is None or not self.is_due(step):
            return None
        layout = self.layout(group)
        current = BatchChoice(layout.atomic, layout.passes - 1)
        return self._tuner.propose(noise, nodes=group.nodes, workers=group.world, current=current, step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"own": None if self._own is None else [self._own.total, self._own.atomic]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own = None if state["own"] is None else _OwnBatch(*state["own"])
