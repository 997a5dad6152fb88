"""Hyperband: brackets of synchronous halving, from many trials compared early to a few trained to the end.

The brackets come one after the other, over and over while there are trials: one begins as soon as those
before it have all their trials and leave a GPU free, and older brackets go first. A study with fewer trials
than one round of brackets has shares them out in the same proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stretto.core.decision import Decision
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, Memory
from stretto.policies.sha import SynchronousTurn, no_halving
from stretto.policies.trials import TUNING_EVENTS, Share, as_before, beside_others, is_quiet
from stretto.search.halving import Bracket, hyperband_brackets
from stretto.search.study import Study


@dataclass(frozen=True, kw_only=True)
class Hyperband:
    """Brackets of successive halving with later and later first rungs."""

    name: ClassVar[str] = "hyperband"
    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS
    looks_up_paused: ClassVar[bool] = True
    tuning: Tuning
    interval_s: float = 60.0
    share: Share = "none"
    """What becomes of GPUs that no bracket can use."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        return beside_others(view, self.tuning.study, lambda trials: self._decide(trials, memory))

    def _decide(self, view: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        study = self.tuning.study
        if not view.total_gpus or (memory is not None and is_quiet(view, memory["quiet"])):
            return as_before(view), memory
        if memory is None:
            memory = no_halving(study.trials)
        return SynchronousTurn(view, memory, self.tuning, brackets_of(study), self.share).decide()


def brackets_of(study: Study) -> Sequence[Bracket]:
    """One round of brackets: of the published sizes, or smaller if the study has not so many trials."""
    published = hyperband_brackets(study.rungs, study.eta)
    if sum(bracket.trials for bracket in published) <= study.trials:
        return published
    return hyperband_brackets(study.rungs, study.eta, study.trials)
