"""HyperSched: the best model by a deadline on a fixed cluster.

Rungs: a trial that falls below the present cut-off of any rung it passed is paused at its next result, and
resumed once it is at or above all of them again. Admission: trials are started and resumed only while a
newcomer could still be trained eta times as long as the longest-running one; from then on the pool only
shrinks. Reallocation: every running trial has one GPU; those left over are shared out, and a trial takes
its share, at one of its results, when the speed it gains until the deadline is worth the restart.

As published, everything that does not run when admission closes is stopped. Here it waits, so that a later
deadline finds it there, and GPUs that the pool could not use even at its largest go on with others: new
trials before those that fell, as long as they could still come as far as the farthest trial has; from then on
whoever has the best metric, fallen or not, if another of its epochs ends by the deadline. Nor is a trial
resized shortly before the deadline for nothing: it takes GPUs only if more of its epochs end by then, and
gives them only to somebody of whom that holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stretto.core.decision import Decision
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, Memory
from stretto.policies.hypersched.rules import HyperSchedOptions
from stretto.policies.hypersched.turn import HyperSchedTurn
from stretto.policies.trials import TUNING_EVENTS, beside_others


@dataclass(frozen=True, kw_only=True)
class HyperSched(HyperSchedOptions):
    """Tunes a study for the best model at its deadline."""

    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS
    tuning: Tuning
    interval_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng

        def decide(trials: ClusterView) -> tuple[Decision, Memory]:
            return HyperSchedTurn(self.tuning, self, trials, memory).decide()

        return beside_others(view, self.tuning.study, decide)
