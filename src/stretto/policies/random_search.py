"""Random search: every trial trains to the end on one GPU, first come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stretto.core.decision import Decision
from stretto.policies.asha import AsynchronousTurn
from stretto.policies.base import ClusterView, Memory
from stretto.policies.trials import TrialPolicy


@dataclass(frozen=True, kw_only=True)
class RandomSearch(TrialPolicy):
    """Every trial to the end."""

    name: ClassVar[str] = "random"

    def decide_trials(self, trials: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        return AsynchronousTurn(self, trials, memory, (), "stop").decide()
