"""Tunes the batch size of a run: the largest goodput that fits the GPU's memory.

Goodput is examples per second times the statistical value of an example (models.goodput). It is computed
from measured step times and the measured gradient noise. Predictions are reliable only near the batch sizes
that were timed, so the batch at most doubles at a time, and stays until the new size was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil

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
"""Share of the memory we plan with; the rest covers fragmentation and errors of the linear model."""


class MemoryModel:
    """Peak memory = constant + slope x examples, fitted to the smallest and the largest batch seen."""

    def __init__(self) -> None:
        self._peak_bytes: dict[int, int] = {}

    def observe(self, atomic: int, peak_bytes: int) -> None:
        """Record the peak memory of passes of `atomic` examples."""
        self._peak_bytes[atomic] = max(peak_bytes, self._peak_bytes.get(atomic, 0))

    def most(self, usable_bytes: float) -> int | None:
        """The largest batch that fits; None if memory does not grow with the batch.

        With a single batch size seen, the constant is assumed to be 0.
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
        # A size that fitted once is always allowed.
        return max(large, int((usable_bytes - constant) / slope))


class GpuMemory:
    """Measures the peak memory of the current GPU, one batch size at a time."""

    def __init__(self) -> None:
        self._batches = MemoryModel()
        self._atomic: int | None = None

    def measure(self, atomic: int) -> bool:
        """Measure passes of `atomic` examples; call it between steps.

        False at the first call for a size: its memory is known at the next call, some steps later.
        """
        if self._atomic == atomic:
            self._batches.observe(atomic, torch.cuda.max_memory_allocated())
            return True
        self._atomic = atomic
        torch.cuda.reset_peak_memory_stats()
        return False

    def most(self) -> int | None:
        """The largest batch that fits beside other users of the GPU."""
        free_bytes, _ = torch.cuda.mem_get_info()
        return self._batches.most(USABLE * (free_bytes + torch.cuda.memory_reserved()))


WARM_UP_STEPS = EARLY_STEPS
"""No change before this step: early in training the noise changes quickly."""
WORTHWHILE = 1.05
"""Minimum gain in goodput for a change: smaller gains are within the model's error."""
LOOK_STEPS = 24
"""Steps between two searches; a new batch size has been timed by then. A change that reverses the previous
one shows that the estimates were wrong: each reversal doubles the time until the next change."""
MEMORY_STEPS = 4
"""Steps to measure memory. At least one of them is an ordinary step, neither split nor cut short by the end
of the data."""
MOST_GROWTH = 2
"""The batch grows at most by this factor at a time."""
FLAT = 1.25
"""If the slowest timed size takes at most this many times as long as the fastest, steps are bound by kernel
launches, and differences between their times are noise."""


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A better batch size, and a sentence with the numbers that justify it."""

    batch: BatchChoice
    reason: str


class BatchTuner:
    """Proposes better batch sizes for the current number of workers."""

    def __init__(self, limits: BatchLimits, memory: GpuMemory | None = None) -> None:
        import scipy.optimize  # noqa: F401, PLC0415  (slow: better now than during training)

        self._limits = limits
        self._memory = memory or (GpuMemory() if torch.cuda.is_available() else None)
        self._observed = Observations()
        self._fitted_to: tuple[SpeedSample, ...] = ()
        self._speed: AllReduceSpeed | None = None
        self._next_look = WARM_UP_STEPS
        self._hold_steps = LOOK_STEPS
        self._grew: bool | None = None
        self._looked_at: tuple[NoiseSample, tuple[SpeedSample, ...]] | None = None
        self._untried_from: tuple[int, BatchChoice] | None = None
        """If no batch this large was timed yet: the number of workers, and the batch before it."""

    def observe(self, speeds: Iterable[SpeedSample]) -> None:
        """Add newly measured step times."""
        for speed in speeds:
            self._observed.add_speed(speed)

    def is_due(self, step: int) -> bool:
        """Whether it is time to search, and the limits allow another batch size."""
        return step >= self._next_look and self._limits.max > self._limits.initial

    def propose(
        self, noise: NoiseSample | None, *, nodes: int, workers: int, current: BatchChoice, step: int
    ) -> BatchChange | None:
        """A better batch size to use from this step on, or None."""
        timed = (nodes, workers, 0, current.atomic) in self._observed.speeds
        if noise is None and current.total(workers) == 1:
            noise = PERFECTLY_SCALABLE  # a single example cannot be split to measure its noise
        if noise is None or not timed or not self.is_due(step):
            return None
        if self._looked_at == (noise, self._observed.news):
            return None
        if self._memory is not None and not self._memory.measure(current.atomic):
            self._next_look = step + MEMORY_STEPS
            return None
        self._looked_at = (noise, self._observed.news)
        change = self._change(noise, nodes, workers, current)
        largest = max(speed.atomic for speed in self._observed.speeds.values())
        untried = change is not None and change.batch.atomic > largest
        self._untried_from = (workers, current) if untried else None
        if self._memory is not None and change is not None:
            self._memory.measure(change.batch.atomic)  # starts measuring, for the next search
        self._next_look = step + (LOOK_STEPS if change is None else self._hold(change, current, workers))
        return change

    def _hold(self, change: BatchChange, current: BatchChoice, workers: int) -> int:
        """Steps until the next search."""
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
        """Go back to the previous batch if the current one, tried untimed, turned out no better."""
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
        """A larger batch size to try, if all sizes so far took about equally long or there is only one.

        It is proposed if the gain is worthwhile, assuming that the larger step takes no longer.
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
        """The initial batch times 1, 2, 4, .. and the maximum, each in as few passes as fit.

        Sizes in between would gain little (goodput is flat around its peak), and each new size costs the
        device some time for set-up.
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
        """Factor that corrects a batch's predicted speed by what was timed.

        For a timed size, the measured time counts. Pass time is convex in the batch size: small batches are
        bound by launches, large ones by computation. So beyond the largest timed size, each additional
        example takes at least as long as the last ones below it.
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
        """The user's limits, tightened by memory and by MOST_GROWTH."""
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
