"""Splitting a total batch over workers and passes."""

from __future__ import annotations

from math import ceil

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits

CEIL_TOLERANCE = 1e-8
"""Float noise that does not count when shares of a batch are rounded up."""


def split_batch(limits: BatchLimits, total: int, workers: int) -> BatchChoice:
    """Each worker's share ceil(total / workers), in the fewest passes that fit on its GPU.

    A single worker above the initial batch makes at least two passes, to estimate gradient noise from their
    difference. Rounding up never raises the total above the largest batch.
    """
    local = ceil(total / workers - CEIL_TOLERANCE)
    passes = max(ceil(local / limits.per_gpu_max - CEIL_TOLERANCE), 1)
    if workers == 1 and total > limits.initial:
        passes = max(passes, 2)
    if not limits.accumulation:
        passes = 1
    atomic = ceil(local / passes - CEIL_TOLERANCE)
    return within_largest(limits, BatchChoice(atomic, passes - 1), workers)


def within_largest(limits: BatchLimits, choice: BatchChoice, workers: int) -> BatchChoice:
    """The choice, with fewer passes or examples if its total is above the largest batch."""
    passes = min(choice.accumulation + 1, limits.max // workers)
    if passes < 1:
        raise InputError(
            f"{workers} workers cannot share a batch of at most {limits.max} examples.",
            remedy="Ask for fewer workers, or allow a larger batch.",
        )
    return BatchChoice(min(choice.atomic, limits.max // (workers * passes)), passes - 1)
