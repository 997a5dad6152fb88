"""How the examples of a step are shared out over workers and passes.

A step takes n examples: the total batch, or what is left of the data. They are cut into

    parts = workers * passes

shares whose sizes differ by one at most; worker r makes pass p with share p * workers + r. The gradient of
a step must be that of the mean over all n examples, and each share's gradient is a mean over its own, so
a share of size s counts with weight s * parts / n before the average over parts: exactly 1 when even.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

from stretto.core.errors import InputError
from stretto.torch.backward import Backward


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Who takes part in a step, and how large it is."""

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
        """This worker's passes in a step of so many examples."""
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
    """One pass of one worker: the examples from `start` to `stop` of the step."""

    start: int
    stop: int
    weight: float
    first: bool
    last: bool
    """The step is complete after this pass."""
    step_examples: int


UNSHARED = Share(start=0, stop=1, weight=1.0, first=True, last=True, step_examples=1)
"""Outside any elastic loader every pass is a step of its own."""


@lru_cache(maxsize=256)
def cut_alike(lead: StepLayout, lead_examples: int | None, beside: StepLayout, beside_examples: int) -> bool:
    """Whether both steps give every worker shares of the same weight: all workers answer alike.

    Without `lead_examples` every pass of the lead is a step of its own, of weight 1 on every worker.
    """
    return all(
        _weights(lead, lead_examples, rank) == _weights(beside, beside_examples, rank)
        for rank in range(beside.workers)
    )


def _weights(layout: StepLayout, examples: int | None, rank: int) -> set[float]:
    """Of a worker's passes. Equal proportions are equal numbers: each is one division of whole numbers."""
    if examples is None:
        return {UNSHARED.weight}
    return {share.weight for share in replace(layout, rank=rank).shares(examples)}


@dataclass(slots=True)
class CurrentStep:
    """The pass that is being computed: the loader sets it, reducers and optimizers look at it."""

    base: StepLayout
    """Of an ordinary step."""
    layout: StepLayout
    """Of the present step."""
    share: Share = UNSHARED
    batches_given: int = 0
    """Batches that the loop which leads has given."""
    step: int = 0
    """Steps of elastic loops done before this one."""
    updates: int = 0
    """Steps in which an optimizer stepped, or that `run.steps` counted, before this one."""
    is_updated: bool = False
    """Whether an optimizer has stepped since the last step was over."""
    asks_completion: bool = False
    """The code asks which passes complete a step, so it need not take each for one."""
    schedule_uses: int = 0
    """How often prepared schedulers were told to step, or code has asked how much of the training is done:
    what learning rates may follow."""
    refusal: InputError | None = None
    """Why no optimizer may step any more."""
    backward: Backward = field(default_factory=Backward)
    stepped_ids: set[int] = field(default_factory=set)
    """Ids of the optimizers that were told to step since the last batch."""
