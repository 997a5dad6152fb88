"""HyperSched: the best model by a deadline, on a cluster of fixed size.

- Rungs (memory.py): a trial that falls below the current cut-off of any rung it passed is paused at its next
  result. It is promoted again, that is resumed, once it is at or above all of its cut-offs.
- Admission (turn.py): trials start and resume only while a newcomer could still train eta times as long as
  the longest-running trial. After that the pool of running trials only shrinks.
- Reallocation (turn.py, rules.py): every running trial has one GPU, and the spare GPUs are shared out. A
  trial takes its share at one of its results, if the speed gained until the deadline is worth the restart.

Three things differ from the paper; `published` restores the paper's rules:

- When admission closes, the paper stops every trial that does not run. Here they wait, so that they can
  resume if the deadline is extended.
- GPUs that the pool cannot use even at its largest go to other trials. New trials come before those that
  fell, as long as they can still catch up with the farthest trial. After that the trial with the best
  metric comes first, fallen or not, if another of its epochs ends by the deadline.
- A trial takes GPUs only if more of its epochs then end by the deadline. It gives GPUs up only to a trial
  for which that holds.
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
    """Tunes a study for the best metric at its deadline."""

    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS
    tuning: Tuning
    interval_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng

        def decide(trials: ClusterView) -> tuple[Decision, Memory]:
            return HyperSchedTurn(self.tuning, self, trials, memory).decide()

        return beside_others(view, self.tuning.study, decide)
