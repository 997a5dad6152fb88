"""Splitting a total batch over workers and passes."""

from __future__ import annotations

from math import ceil

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits

CEIL_TOLERANCE = 1e-8


def split_batch(limits: BatchLimits, total: int, workers: int) -> BatchChoice:
    """Each worker's share ceil(total / workers), in the fewest passes its GPU can hold.

    A single worker above the initial batch makes at least two passes: it estimates gradient noise from
    their difference. Rounding up never takes the total above the largest batch.
    """
    local = ceil(total / workers - CEIL_TOLERANCE)
    passes = max(ceil(local / limits.per_gpu_max - CEIL_TOLERANCE), 1)
    if workers == 1 and total > limits.initial:
        passes = max(passes, 2)
    if not limits.accumulation:
        passes = 1
    atomic = min(ceil(local / passes - CEIL_TOLERANCE), limits.max // (workers * passes))
    if atomic < 1:
        raise InputError(
            f"{workers} workers cannot share a batch of at most {limits.max} examples.",
            remedy="Ask for fewer workers, or allow a larger batch.",
        )
    return BatchChoice(atomic, passes - 1)
