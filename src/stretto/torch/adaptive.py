"""A run that picks its own batch size: the one with the best goodput that its memory holds.

Goodput is examples per second times what an example is worth (models.goodput), from step times seen and
gradient noise measured. A batch size is believed only near those tried, so it at most doubles at a time,
and stays until it has been timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

import torch

from stretto.core.allocation import BatchChoice
from stretto.core.job import BatchLimits
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.models.belief import Observations
from stretto.models.goodput import GoodputTable, JobModel
from stretto.models.noise import PERFECTLY_SCALABLE, GradientNoise
from stretto.models.speed import AllReduceSpeed, fit_all_reduce
from stretto.torch.noise import EARLY_STEPS
from stretto.torch.rules import progress_of_step

USABLE = 0.9
"""Of the memory: the rest is for the allocator's gaps and what a linear model misses."""


class MemoryLimit(Protocol):
    """What limits the batch of one worker."""

    def look(self, atomic: int) -> bool:
        """To be called while passes are over `atomic` examples; whether it is known what they take.

        If not, it will be at the next look, after some steps.
        """

    def most(self) -> int | None:
        """The largest batch that fits, if that is known."""


class MemoryModel:
    """Peak memory = constant + slope x examples, through the smallest and the largest batch seen."""

    def __init__(self) -> None:
        self._peak_bytes: dict[int, int] = {}

    def saw(self, atomic: int, peak_bytes: int) -> None:
        """A pass over `atomic` examples never took more than this."""
        self._peak_bytes[atomic] = max(peak_bytes, self._peak_bytes.get(atomic, 0))

    def most(self, usable_bytes: float) -> int | None:
        """The largest batch that fits; None where memory does not grow with the batch.

        One batch size does not tell the constant, which is then taken to be nothing.
        """
        if not self._peak_bytes:
            return None
        small, large = min(self._peak_bytes), max(self._peak_bytes)
        small_bytes, large_bytes = self._peak_bytes[small], self._peak_bytes[large]
        if small == large:
            slope, constant = small_bytes / small, 0.0
        else:
            slope = (large_bytes - small_bytes) / (large - small)
            constant = small_bytes - slope * small
        if slope <= 0:
            return None
        # What was seen to fit, fits.
        return max(large, int((usable_bytes - constant) / slope))


class GpuMemory:
    """Watches the peak of the present card, one batch size at a time."""

    def __init__(self) -> None:
        self._batches = MemoryModel()
        self._atomic: int | None = None

    def look(self, atomic: int) -> bool:
        if self._atomic == atomic:
            self._batches.saw(atomic, torch.cuda.max_memory_allocated())
            return True
        self._atomic = atomic
        torch.cuda.reset_peak_memory_stats()
        return False

    def most(self) -> int | None:
        """The largest batch that fits in what others leave of the card."""
        free_bytes, _ = torch.cuda.mem_get_info()
        return self._batches.most(USABLE * (free_bytes + torch.cuda.memory_reserved()))


def gpu_memory() -> GpuMemory | None:
    """The present card; None without one, where the user's bound has to do."""
    return GpuMemory() if torch.cuda.is_available() else None


WARM_UP_STEPS = EARLY_STEPS
"""No change before: the loss falls steeply, and its noise now says little about later."""
WORTHWHILE = 1.05
"""Goodput must rise by this much: less is within what models err by."""
LOOK_STEPS = 24
"""Between two looks for a better one; a new batch size has been timed by then. A change that takes back the
one before shows that times or noise were misjudged: each makes changes stay twice as long."""
MEMORY_STEPS = 4
"""Of so many at least one is an ordinary step, neither split nor the last of a pass, which shows what memory
its size takes."""
MOST_GROWTH = 2
"""The batch at most doubles at a time."""
FLAT = 1.25
"""While the slowest size timed takes at most so many times as long as the fastest, launching the work takes
longer than the work, and the difference between two such times is chance."""


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A better batch size, and a sentence with the numbers that speak for it."""

    batch: BatchChoice
    reason: str


class BatchTuner:
    """Says when another batch size is better for the workers there are."""

    def __init__(self, limits: BatchLimits, memory: MemoryLimit | None = None) -> None:
        import scipy.optimize  # noqa: F401, PLC0415  (now, rather than at the first fit amid training)

        self._limits = limits
        self._memory = memory or gpu_memory()
        self._observed = Observations()
        self._fitted_to: tuple[SpeedSample, ...] = ()
        self._speed: AllReduceSpeed | None = None
        self._next_look = WARM_UP_STEPS
        self._hold_steps = LOOK_STEPS
        self._grew: bool | None = None
        self._looked_at: tuple[NoiseSample, tuple[SpeedSample, ...]] | None = None
        self._untried_from: tuple[int, BatchChoice] | None = None
        """Where the present batch was larger than any that was timed: the workers, and the batch before."""

    def saw(self, speeds: Iterable[SpeedSample]) -> None:
        """Step times measured since the last call."""
        for speed in speeds:
            self._observed.add_speed(speed)

    def is_due(self, step: int) -> bool:
        """Whether it is time to look for a better batch size, and there may be one."""
        return step >= self._next_look and self._limits.max > self._limits.initial

    def propose(
        self, noise: NoiseSample | None, *, nodes: int, workers: int, current: BatchChoice, step: int
    ) -> BatchChange | None:
        """A batch size worth changing to at this step, if there is one."""
        timed = (nodes, workers, 0, current.atomic) in self._observed.speeds
        if noise is None and current.total(workers) == 1:
            noise = PERFECTLY_SCALABLE  # one example cannot be split to tell its noise
        if noise is None or not timed or not self.is_due(step):
            return None
        if self._looked_at == (noise, self._observed.news):
            return None
        if self._memory is not None and not self._memory.look(current.atomic):
            self._next_look = step + MEMORY_STEPS
            return None
        self._looked_at = (noise, self._observed.news)
        change = self._change(noise, nodes, workers, current)
        largest = max(speed.atomic for speed in self._observed.speeds.values())
        untried = change is not None and change.batch.atomic > largest
        self._untried_from = (workers, current) if untried else None
        if self._memory is not None and change is not None:
            self._memory.look(change.batch.atomic)  # from now on, so that it is known at the next look
        self._next_look = step + (LOOK_STEPS if change is None else self._hold(change, current, workers))
        return change

    def _hold(self, change: BatchChange, current: BatchChoice, workers: int) -> int:
        """For how many steps a change stays."""
        grows = change.batch.total(workers) > current.total(workers)
        if self._grew is not None and grows is not self._grew:
            self._hold_steps *= 2
        self._grew = grows
        return self._hold_steps

    def _change(
        self, noise: NoiseSample, nodes: int, workers: int, current: BatchChoice
    ) -> BatchChange | None:
        limits = self._present_limits(workers, current)
        if trial := self._trial(noise, workers, current, limits):
            return trial
        table = GoodputTable([JobModel(self._fit(), noise, self._limits)])

        def goodput(choice: BatchChoice) -> float:
            return self._believed(nodes, workers, choice.atomic) * table.at(0, nodes, workers, choice)

        best = max(self._choices(workers, limits), key=goodput, default=current)
        present, reached = goodput(current), goodput(best)
        if reached < WORTHWHILE * present:
            return self._back(goodput, workers, current)
        passes = f" in {best.accumulation + 1} passes" if best.accumulation else ""
        return BatchChange(
            best,
            f"batch {current.total(workers)} becomes {best.total(workers)}{passes}: at a gradient noise "
            f"scale of {self._noise_scale(noise):.4g} examples, goodput rises from {present:.4g} to "
            f"{reached:.4g} examples/s.",
        )

    def _back(
        self, goodput: Callable[[BatchChoice], float], workers: int, current: BatchChoice
    ) -> BatchChange | None:
        """The batch before, if nobody had timed the present one and it turns out to be no better."""
        if self._untried_from is None or self._untried_from[0] != workers:
            return None
        before = self._untried_from[1]
        present, past = goodput(current), goodput(before)
        if present >= past:
            return None
        return BatchChange(
            before,
            f"batch {current.total(workers)} becomes {before.total(workers)} again: goodput is {present:.4g} "
            f"examples/s, not more than the {past:.4g} before.",
        )

    def _trial(
        self, noise: NoiseSample, workers: int, current: BatchChoice, limits: BatchLimits
    ) -> BatchChange | None:
        """A larger batch size while nobody knows what it costs: times so far are of one size, or all alike.

        Worth it where the step would gain enough even if it took no longer.
        """
        timed = self._observed.speeds.values()
        passes_s = [speed.step_s - speed.sync_s for speed in timed]
        if max(passes_s) > FLAT * min(passes_s):
            return None
        most = min(limits.per_gpu_max, limits.max // (workers * (current.accumulation + 1)))
        larger = BatchChoice(min(MOST_GROWTH * current.atomic, most), current.accumulation)
        if larger.atomic <= max(*(speed.atomic for speed in timed), current.atomic, limits.per_gpu_min - 1):
            return None
        before, after = (
            progress_of_step(noise, batch.total(workers) / limits.initial) for batch in (current, larger)
        )
        if after < WORTHWHILE * before:
            return None
        return BatchChange(
            larger,
            f"batch {current.total(workers)} becomes {larger.total(workers)} to see how long a step then "
            f"takes: at a gradient noise scale of {self._noise_scale(noise):.4g} examples it is worth "
            f"{after / before:.3g} of the present ones.",
        )

    def _choices(self, workers: int, limits: BatchLimits) -> Iterator[BatchChoice]:
        """The initial batch doubled so and so often, and the largest, in as few passes as it fits in.

        Other sizes would hardly be better (goodput is flat about its peak), and each costs a device the time
        to prepare for it.
        """
        totals = {limits.initial << times for times in range((limits.max // limits.initial).bit_length())}
        at_once = workers * limits.per_gpu_max
        largest = self._limits.max if limits.accumulation else min(self._limits.max, at_once)
        for total in totals | {largest}:
            passes = ceil(total / at_once)
            atomic = min(ceil(total / (workers * passes)), limits.max // (workers * passes))
            fits = limits.per_gpu_min <= atomic <= limits.per_gpu_max
            if total <= limits.max and fits and (passes == 1 or limits.accumulation):
                yield BatchChoice(atomic, passes - 1)

    def _believed(self, nodes: int, workers: int, atomic: int) -> float:
        """The share of a batch's predicted speed that may be counted on.

        What was timed takes as long as it took. Times of passes over the batch size bend upwards only: first
        launching the work takes longest, then the work. So beyond the largest one timed, an example takes at
        least as long as one did just below.
        """
        timed_s = {
            speed.atomic: speed.step_s - speed.sync_s
            for speed in self._observed.speeds.values()
            if (speed.nodes, speed.workers) == (nodes, workers)
        }
        foreseen_s = float(self._fit().pass_s(atomic))
        if atomic in timed_s:
            return foreseen_s / timed_s[atomic]
        largest = max(timed_s, default=atomic)
        if atomic <= largest or len(timed_s) == 1:
            return 1.0
        longest_s = timed_s.pop(largest)
        example_s = max((longest_s - pass_s) / (largest - size) for size, pass_s in timed_s.items())
        least_s = longest_s + example_s * (atomic - largest)
        return min(foreseen_s / least_s, 1.0)

    def _noise_scale(self, noise: NoiseSample) -> float:
        return GradientNoise(noise.sqr, noise.var, self._limits.initial).noise_scale

    def _present_limits(self, workers: int, current: BatchChoice) -> BatchLimits:
        """The user's, what fits the card, and not too far from where we are."""
        most = self._memory.most() if self._memory is not None else None
        per_worker = self._limits.per_gpu_max if most is None else min(self._limits.per_gpu_max, most)
        farthest = max(MOST_GROWTH * current.total(workers), self._limits.initial)
        return replace(
            self._limits,
            max=min(self._limits.max, farthest),
            per_gpu_max=max(per_worker, self._limits.per_gpu_min),
        )

    def _fit(self) -> AllReduceSpeed:
        if self._speed is None or self._observed.news is not self._fitted_to:
            self._fitted_to = self._observed.news
            self._speed = fit_all_reduce(self._fitted_to)
        return self._speed
