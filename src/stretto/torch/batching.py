"""How large a step is: fixed by the user, ordered by a controller, or tuned by the run itself."""

from __future__ import annotations

from math import ceil
from typing import Any

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.torch.adaptive import BatchTuner, Change
from stretto.torch.data import Source
from stretto.torch.group import Group
from stretto.torch.rules import progress_of_step
from stretto.torch.turn import Layout

_DEFAULT_GROWTH = 16
"""Without a bound of the user's, an adaptive batch grows to so many times the initial one."""


class Batching:
    """The batch size of a run."""

    def __init__(self) -> None:
        self.adaptive = False
        self.order: BatchChoice | None = None
        """A controller's choice for the group as it is."""
        self._own: BatchChoice | None = None
        self._max: int | None = None
        self._per_worker: tuple[int, int] | None = None
        self._accumulates = True
        self._source: Source | None = None
        self._expected: Source | None = None
        """The first loader there is, before any was looped over."""
        self._tuner: BatchTuner | None = None

    def bound(
        self, *, adaptive: bool, most: int | None, per_worker: tuple[int, int] | None, accumulates: bool
    ) -> None:
        """What the user allows."""
        given: object = most
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise InputError(f"max_batch_size is {given!r}.", remedy="Give a whole number from 1 up.")
        if per_worker is not None and not 1 <= per_worker[0] <= per_worker[1]:
            raise InputError(
                f"per_worker_batch is {per_worker}.", remedy="Give the smallest and the largest: (16, 256)."
            )
        if most is not None and not adaptive:
            raise InputError(
                "max_batch_size is given for a batch that does not change.", remedy="Set adaptive=True."
            )
        self.adaptive, self._max, self._per_worker, self._accumulates = (
            adaptive,
            most,
            per_worker,
            accumulates,
        )

    def expect(self, source: Source) -> None:
        """A loader to come. InputError if it does not agree with the bounds."""
        self.limits(source)
        self._expected = self._expected or source

    def use(self, source: Source) -> None:
        """The loader whose steps come next."""
        if self._source is source:
            return
        self._source = source
        if self.adaptive and self._tuner is None:
            self._tuner = BatchTuner(self.limits(source))

    def limits(self, source: Source) -> BatchLimits:
        initial = source.batch_size
        most = self._max or (
            min(initial * _DEFAULT_GROWTH, max(source.examples, initial)) if self.adaptive else initial
        )
        if most < initial:
            raise InputError(
                f"max_batch_size {most} is below the batch size {initial}.",
                remedy="Raise one or lower the other.",
            )
        low, high = self._per_worker or (1, most)
        if low > initial:
            raise InputError(
                f"per_worker_batch begins at {low}, above the batch size {initial}.",
                remedy="Raise one or lower the other.",
            )
        return BatchLimits(
            initial=initial,
            requested=initial,
            max=most,
            per_gpu_min=low,
            per_gpu_max=high,
            accumulation=self._accumulates,
        )

    def choose(self, choice: BatchChoice) -> None:
        """Another batch for the group as it is."""
        if self.order is None:
            self._own = choice
        else:
            self.order = choice

    def layout(self, group: Group) -> Layout:
        """How the group as it is shares out a step."""
        source = self._source or self._expected
        if source is None:
            return Layout(total=1, workers=group.world, rank=group.rank)
        limits = self.limits(source)
        total, passes = limits.initial, 1
        chosen = self.order or self._own
        if chosen is not None:
            passes = chosen.accumulation + 1
            if self.adaptive:
                total = chosen.total(group.world)
        if self._accumulates:
            passes = max(passes, ceil(total / group.world / limits.per_gpu_max))
        return Layout(total=total, workers=group.world, passes=passes, rank=group.rank)

    def worth(self, noise: NoiseSample | None, examples: int) -> float:
        """Steps at the initial batch that one step of so many examples is worth."""
        assert self._source is not None
        return progress_of_step(noise, examples / self._source.batch_size)

    def saw(self, speeds: tuple[SpeedSample, ...]) -> None:
        if self._tuner is not None:
            self._tuner.saw(speeds)

    def tune(self, group: Group, noise: NoiseSample | None, step: int) -> Change | None:
        """A better batch size for the group as it is, if there is one."""
        if self._tuner is None or not self._tuner.is_due(step):
            return None
        layout = self.layout(group)
        current = BatchChoice(layout.atomic, layout.passes - 1)
        return self._tuner.propose(noise, nodes=group.nodes, workers=group.world, current=current, step=step)

    def state_dict(self) -> dict[str, Any]:
        own = None if self._own is None else [self._own.atomic, self._own.accumulation]
        return {"own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own = None if state["own"] is None else BatchChoice(*state["own"])
