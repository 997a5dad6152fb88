"""The largest batch that a worker's card holds, from what smaller ones took."""

from __future__ import annotations

from typing import Protocol

import torch

USABLE = 0.9
"""Of the memory: the rest is for the allocator's gaps and what a linear model misses."""


class MemoryBound(Protocol):
    """What limits the batch of one worker."""

    def look(self, atomic: int) -> bool:
        """To be called while passes are over `atomic` examples; whether it is known what they take.

        If not, it will be at the next look, after some steps.
        """

    def most(self) -> int | None:
        """The largest batch that fits, if that is known."""


class BatchMemory:
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


class CardMemory:
    """Watches the peak of the present card, one batch size at a time."""

    def __init__(self) -> None:
        self._batches = BatchMemory()
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


def card_memory() -> CardMemory | None:
    """The present card; None without one, where the user's bound has to do."""
    return CardMemory() if torch.cuda.is_available() else None
