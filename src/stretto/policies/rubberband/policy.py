"""RubberBand: a tuning job that meets its deadline at the least cost, by a plan for each of its stages.

From stage to stage fewer trials survive, so the best cluster for a study shrinks (or its trials grow). A
planner (planning/planner.py) decides beforehand the GPUs per trial and the nodes of every stage. This policy
carries the plan out. In each stage it

1. requests the stage's nodes and packs the trials on them,
2. waits until every trial has reached the end of the stage,
3. stops all but the best and gives back the nodes that are no longer needed.

It plans again from the current state when epochs or nodes take longer or shorter than the planner assumed.
If nodes are refused, the stage runs on those that came.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

import msgspec
import numpy as np

from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import NodeRefused
from stretto.planning.forecast import Outcome, StudyProgress
from stretto.planning.plan import StagePlan
from stretto.planning.planner import LimitRule, Planner
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, Memory
from stretto.policies.common import check_option
from stretto.policies.rubberband.drift import make_plan, plan_to_follow, progress_at_start, with_seen_delays
from stretto.policies.rubberband.memory import PlanBasis, PlanState
from stretto.policies.rubberband.turn import RubberBandTurn
from stretto.policies.trials import TUNING_EVENTS, beside_others


@dataclass(frozen=True, kw_only=True)
class RubberBand:
    """Follows a plan for the whole study: `agreed`, or one made at the start."""

    tuning: Tuning
    planner: Planner = "search"
    """How a plan is found: by our `search`, or by the `published` greedy planner."""
    rule: LimitRule = "quantile"
    """Keep the limits with probability q (`quantile`), or on average as published (`mean`)."""
    replan: float = 0.15
    """Plan again when the expected end differs from the forecast by this share of the time; 0: never."""
    agreed: Outcome | None = field(default=None, compare=False)
    """The plan that the user saw before the run; followed if it still keeps the deadline at the start."""
    interval_s: float = 600.0

    name: ClassVar[str] = "rubberband"
    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS | {NodeRefused.kind}
    rents: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_option(self.name, "replan", self.replan, 0 <= self.replan < inf, "0 or a share such as 0.15")

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        return beside_others(view, self.tuning.study, lambda trials: self._decide(trials, memory, rng))

    def _decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        if memory is None:
            if not view.jobs:
                return Decision(allocations={}), None
            state = self._begin(view, rng)
        elif _nothing_new(view, memory):
            return _as_it_is(view, memory), memory
        else:
            state = msgspec.convert(memory["course"], PlanState)
        tuning = with_seen_delays(self.tuning, view.arrivals)

        def plan_again(start: StudyProgress, slowness: float) -> tuple[list[StagePlan], PlanBasis]:
            return make_plan(tuning, rng, self.planner, self.rule, start=start, slowness=slowness)

        decision = RubberBandTurn(tuning, state, view, plan_again, self.replan).decide()
        return decision, _remember(view, decision, state)

    def _begin(self, view: ClusterView, rng: np.random.Generator) -> PlanState:
        start = progress_at_start(self.tuning, view.nodes)
        if self.agreed is not None and self.agreed.keeps_deadline(self.tuning.limits):
            stages, footing = plan_to_follow(self.agreed, self.tuning, self.rule, start=start)
        else:
            stages, footing = make_plan(self.tuning, rng, self.planner, self.rule, start=start)
        return PlanState(stages=stages, footing=footing, quota=stages[0].trials)


def _remember(view: ClusterView, decision: Decision, state: PlanState) -> Memory:
    """The state, and a few values that tell quickly whether anything is new."""
    released = set(decision.wish.release) if decision.wish else set[str]()
    return {
        "course": msgspec.to_builtins(state),
        "until_epoch": None if state.is_last else state.plan.last_epoch,
        "check_s": state.check_s,
        "wake_at_s": decision.wake_at_s,
        "jobs": len(view.jobs) - len(decision.stops),
        "nodes": [node.id for node in view.nodes if node.id not in released],
        "refusals": len(view.refused),
        "waits": {
            job_id: reason.text
            for job_id, reason in decision.reasons.items()
            if job_id not in decision.allocations and job_id not in decision.stops
        },
    }


def _nothing_new(view: ClusterView, memory: dict[str, Any]) -> bool:
    """Whether running trials only made progress. This is called at every result, so it must be fast."""
    for due_s in (memory["check_s"], memory["wake_at_s"]):
        if due_s is not None and view.now_s >= due_s:
            return False
    if len(view.jobs) != memory["jobs"] or len(view.refused) != memory["refusals"]:
        return False
    if [node.id for node in view.nodes] != memory["nodes"]:
        return False
    until, waits = memory["until_epoch"] or inf, memory["waits"]
    for job in view.jobs:
        if not job.allocation.workers:
            if job.id not in waits:
                return False
        elif job.results:
            last = job.results[-1]
            if last.epoch >= until or last.value is None or not -inf < last.value < inf:
                return False
    return True


def _as_it_is(view: ClusterView, memory: dict[str, Any]) -> Decision:
    waits = memory["waits"]
    return Decision(
        allocations={job.id: job.allocation for job in view.jobs if job.allocation.workers},
        reasons={
            job.id: Reason(ReasonCode.WAITS, waits[job.id]) for job in view.jobs if not job.allocation.workers
        },
        wake_at_s=memory["wake_at_s"],
    )
