"""A plan: how many GPUs each trial gets and which nodes are held, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a study: who trains how far, on what."""

    first_epoch: int
    last_epoch: int
    trials: int
    gpus_per_trial: int
    at_once: int
    """Trials that run at the same time: all of them, or some at a time, in waves."""
    nodes: int
    instance: str

    @property
    def epochs(self) -> int:
        return self.last_epoch - self.first_epoch + 1

    @property
    def waves(self) -> int:
        return -(-self.trials // self.at_once)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to hold in every stage of a study."""

    stages: tuple[StagePlan, ...]
