"""How the examples of one step are split over workers and passes.

A step takes n examples: the total batch, or fewer at the end of the data. They are cut into

    parts = workers * passes

shares whose sizes differ by at most one. In pass p, worker r computes share p * workers + r. The gradient of
the step must be the mean over all n examples, but each share's gradient is a mean over that share only. So a
share of s examples gets the weight s * parts / n before we average over the parts. It is 1 for equal shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

from stretto.core.errors import InputError
from stretto.torch.backward import Backward


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The size of a step, and how it is split."""

    total: int
    """Examples of a full step."""
    workers: int = 1
    passes: int = 1
    rank: int = 0

    @property
    def parts(self) -> int:
        return self.workers * self.passes

    @property
    def atomic(self) -> int:
        """Examples of one worker's pass, rounded up."""
        return ceil(self.total / self.parts)

    def in_passes(self, passes: int) -> StepLayout:
        """The same step in another number of passes."""
        return replace(self, passes=passes)

    def shares(self, examples: int) -> list[Share]:
        """This worker's passes in a step of `examples` examples."""
        return [self._share(examples, number) for number in range(self.passes)]

    def _share(self, examples: int, number: int) -> Share:
        place = number * self.workers + self.rank
        start, stop = place * examples // self.parts, (place + 1) * examples // self.parts
        return Share(
            start=start,
            stop=stop,
            weight=(stop - start) * self.parts / examples,
            first=number == 0,
            last=number == self.passes - 1,
            step_examples=examples,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """One pass of one worker: examples `start` to `stop` of the step."""

    start: int
    stop: int
    weight: float
    first: bool
    last: bool
    """The step is complete after this pass."""
    step_examples: int


UNSHARED = Share(start=0, stop=1, weight=1.0, first=True, last=True, step_examples=1)
"""Outside an elastic loop nothing is shared out: every pass is a whole step."""


@lru_cache(maxsize=256)
def have_equal_weights(
    lead: StepLayout, lead_examples: int | None, beside: StepLayout, beside_examples: int
) -> bool:
    """Whether both steps give every worker shares of the same weight; the answer is equal on all workers.

    If `lead_examples` is None, the leading loop is not shared out: its weight is 1 on every worker.
    """
    return all(
        _weights(lead, lead_examples, rank) == _weights(beside, beside_examples, rank)
        for rank in range(beside.workers)
    )


def _weights(layout: StepLayout, examples: int | None, rank: int) -> set[float]:
    """The weights of a worker's passes. They compare exactly: each is one division of whole numbers."""
    if examples is None:
        return {UNSHARED.weight}
    return {share.weight for share in replace(layout, rank=rank).shares(examples)}


@dataclass(slots=True)
class CurrentStep:
    """The step and pass under computation. The loader sets it; reducers and optimizers read it."""

    base: StepLayout
    """The layout of an ordinary step."""
    layout: StepLayout
    """The layout of this step."""
    share: Share = UNSHARED
    batches_given: int = 0
    """Batches that the leading loop has yielded."""
    step: int = 0
    """Steps of elastic loops completed before this one."""
    updates: int = 0
    """Earlier steps in which an optimizer stepped, or that `run.steps` counted."""
    is_updated: bool = False
    """Whether an optimizer has stepped since the last step ended."""
    asks_completion: bool = False
    """The user's code reads `run.step_is_complete`, so it knows that a step may take several passes."""
    schedule_uses: int = 0
    """Calls of prepared schedulers and reads of `run.progress`: learning rates may follow either."""
    refusal: InputError | None = None
    """If set, no optimizer may step any more, for this reason."""
    backward: Backward = field(default_factory=Backward)
    stepped_ids: set[int] = field(default_factory=set)
    """Ids of the optimizers whose `step()` was called since the last batch."""
