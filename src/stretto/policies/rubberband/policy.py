"""RubberBand: a tuning job done by its deadline at the least cost, by a plan for every stage of it.

Trials that live on are fewer from stage to stage, so the cluster that suits a study shrinks (or its trials
grow). A planner says beforehand how many GPUs each trial and how many nodes each stage gets; this policy
carries that out: it asks for the nodes, packs trials on them, lets them wait for each other at the end of the
stage, stops all but the best, gives back the nodes that come free. When epochs or nodes take another time
than the planner was told, it plans again from where it is; a stage whose nodes are refused is done on those
that are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

import numpy as np

from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import NodeRefused
from stretto.planning.forecast import Outcome, StudyProgress
from stretto.planning.plan import StagePlan
from stretto.planning.planner import LimitRule, Planner
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, Memory
from stretto.policies.common import check_option
from stretto.policies.rubberband.drift import as_seen, beginning, laid_out, make_plan
from stretto.policies.rubberband.memory import PlanBasis, PlanState, dump, load
from stretto.policies.rubberband.turn import RubberBandTurn
from stretto.policies.trials import TUNING_EVENTS, beside_others


@dataclass(frozen=True, kw_only=True)
class RubberBand:
    """Follows a plan of the whole study stage by stage: the one agreed on, or one made at first."""

    tuning: Tuning
    planner: Planner = "search"
    """How a plan is found: `search`, or the `published` greedy."""
    rule: LimitRule = "quantile"
    """Limits are kept with probability q (`quantile`), or on average (`mean`), as published."""
    replan: float = 0.15
    """Plan again when the finish is off the forecast by more than this share of the time; 0: never."""
    agreed: Outcome | None = field(default=None, compare=False)
    """What was planned before, and shown; it is followed if it still keeps the deadline as the run begins."""
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
            course = self._begin(view, rng)
        elif _nothing_new(view, memory):
            return _as_it_is(view, memory), memory
        else:
            course = load(memory["course"])
        tuning = as_seen(self.tuning, view.arrivals)

        def plan_again(start: StudyProgress, slowness: float) -> tuple[list[StagePlan], PlanBasis]:
            return make_plan(tuning, rng, self.planner, self.rule, start=start, slowness=slowness)

        decision = RubberBandTurn(tuning, course, view, plan_again, self.replan).decide()
        return decision, _remember(view, decision, course)

    def _begin(self, view: ClusterView, rng: np.random.Generator) -> PlanState:
        start = beginning(self.tuning, view.nodes)
        if self.agreed is not None and self.agreed.keeps_deadline(self.tuning.limits):
            stages, footing = laid_out(self.agreed, self.tuning, self.rule, start=start)
        else:
            stages, footing = make_plan(self.tuning, rng, self.planner, self.rule, start=start)
        return PlanState(stages=stages, footing=footing, quota=stages[0].trials)


def _remember(view: ClusterView, decision: Decision, course: PlanState) -> Memory:
    """The course, and beside it the little that tells whether anything is new."""
    released = set(decision.wish.release) if decision.wish else set[str]()
    return {
        "course": dump(course),
        "until_epoch": None if course.is_last else course.plan.last_epoch,
        "check_s": course.check_s,
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
    """Whether running trials just went on. Asked at every result, so it must be quick."""
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
