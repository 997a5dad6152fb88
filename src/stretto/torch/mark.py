"""Moments between steps, by the clock of whoever does the work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A moment in the course of the work; times between two of the same kind can be told."""

    @property
    def is_over(self) -> bool:
        """Whether the work has come so far."""

    def since_s(self, earlier: Self) -> float:
        """Seconds from an earlier one to this one; both must be over."""


Wait = tuple[Mark, Mark]
"""When one began and when it was over."""


class HostMark:
    """Now, by the processor's clock."""

    is_over = True

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def since_s(self, earlier: HostMark) -> float:
        return self._at_s - earlier._at_s


class CardMark:
    """When the card has done what it was given until now.

    The processor runs ahead of it, by more of the short steps than of the long ones, so that its own clock
    says little of single steps, and makes the first ones of a larger batch look cheap.
    """

    def __init__(self, device: int) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    @property
    def is_over(self) -> bool:
        return bool(self._event.query())

    def since_s(self, earlier: CardMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def marker() -> Callable[[], Mark]:
    """What makes marks in this process: of the card that is the present one now, if there is one."""
    return functools.partial(CardMark, torch.cuda.current_device()) if torch.cuda.is_available() else HostMark
