"""What a cloud really does when nodes are asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.core.resources import Resources


@dataclass(frozen=True, slots=True)
class Launch:
    """One node that was asked for: what it will be, and how long that takes."""

    capacity: Resources
    queue_s: float
    init_s: float


class Cloud(Protocol):
    """Where a simulation's nodes come from."""

    def launch(self, instance: str, count: int, request: int) -> Sequence[Launch]:
        """The nodes that the request of this number gets; asked again, it answers the same."""
