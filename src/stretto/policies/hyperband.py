"""Hyperband: brackets of synchronous halving, from many trials compared early to a few trained to the end.

Brackets start in order, again and again while there are trials. A bracket starts when those before it have
all their trials and leave a GPU free; older brackets come first. A study with fewer trials than one round of
brackets distributes them over the brackets in the same proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stretto.core.decision import Decision
from stretto.policies.base import ClusterView, Memory
from stretto.policies.sha import SynchronousTurn, no_halving
from stretto.policies.trials import TrialPolicy
from stretto.search.halving import Bracket, hyperband_brackets
from stretto.search.study import Study


@dataclass(frozen=True, kw_only=True)
class Hyperband(TrialPolicy):
    """Brackets of successive halving; each bracket has a later first rung."""

    name: ClassVar[str] = "hyperband"

    def decide_trials(self, trials: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        study = self.tuning.study
        return SynchronousTurn(self, trials, memory or no_halving(study.trials), brackets_of(study)).decide()


def brackets_of(study: Study) -> Sequence[Bracket]:
    """One round of brackets, of the published sizes, or smaller if the study has fewer trials."""
    published = hyperband_brackets(study.rungs, study.eta)
    if sum(bracket.trials for bracket in published) <= study.trials:
        return published
    return hyperband_brackets(study.rungs, study.eta, study.trials)
