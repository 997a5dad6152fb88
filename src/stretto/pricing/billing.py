"""Billing rules: from held time to money."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Per(StrEnum):
    """What is charged."""

    INSTANCE = "instance"
    """Every second a node is held, also while it starts up or idles behind stragglers."""
    FUNCTION = "function"
    """Only the GPU time that trials hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Billing:
    """The rules that turn held time into money."""

    per: Per = Per.INSTANCE
    granularity_s: float = 1.0
    """Held time is rounded up to a multiple of this."""
    minimum_s: float = 60.0
    """The minimum time charged for a node."""
    usd_per_gb: float = 0.0
    """The price of moving data to a new node."""
    dataset_gb: float = 0.0
    """The data that every new node receives."""

    @property
    def usd_per_new_node(self) -> float:
        return self.usd_per_gb * self.dataset_gb

    def charged_s(self, held_s: Floats) -> Floats:
        """The time charged for nodes held this long."""
        steps = np.ceil(held_s / self.granularity_s - 1e-9)
        return np.maximum(steps * self.granularity_s, self.minimum_s)
