"""Random search: every trial is trained to the end, first come, first served, on one GPU each.

Once there are fewer trials than GPUs, the GPUs left over stay free or are shared as `share` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stretto.core.decision import Decision
from stretto.planning.tuning import Tuning
from stretto.policies.asha import asynchronous
from stretto.policies.base import ClusterView, Memory
from stretto.policies.trials import TUNING_EVENTS, Share


@dataclass(frozen=True, kw_only=True)
class RandomSearch:
    """Every trial to the end."""

    name: ClassVar[str] = "random"
    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS
    tuning: Tuning
    interval_s: float = 60.0
    share: Share = "none"
    """What becomes of GPUs that no other trial can use."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        return asynchronous(view, memory, self.tuning, (), variant="stop", share=self.share)
