"""Ways to improve a plan: the paper's greedy planner, and exchanges in one or two stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from stretto.planning.candidates import Key, Menu, PlanPool, PlanScore, by_rank
from stretto.planning.plan import Plan, StagePlan

NEAR = 2
"""In an exchange of two stages, each moves at most this far along the options of its instance type."""


def decrement(plan: Plan, menus: Sequence[Menu], pool: PlanPool) -> Plan:
    """The published greedy planner: as long as it pays, take nodes away from one stage.

    This is the stage with the largest cost-marginal benefit, M = money saved / time lost.
    """
    while True:
        now = pool.judge(plan)
        better = [
            candidate
            for candidate in _decremented(plan, menus)
            if (then := pool.judge(candidate)).excess <= 0.0 and then.cost_usd < now.cost_usd
        ]
        if not better:
            return plan
        plan = max(better, key=lambda candidate: marginal_benefit(now, pool.judge(candidate)))


def marginal_benefit(now: PlanScore, then: PlanScore) -> tuple[float, float]:
    """Money saved per time lost; infinite if no time is lost. Ties go to the cheaper plan."""
    lost_s, saved_usd = then.finish_s - now.finish_s, now.cost_usd - then.cost_usd
    return (math.inf if lost_s <= 0.0 else saved_usd / lost_s), -then.cost_usd


def _decremented(plan: Plan, menus: Sequence[Menu]) -> Iterator[Plan]:
    for index, (stage, menu) in enumerate(zip(plan.stages, menus, strict=True)):
        fewer = [
            option for option in menu if option.instance == stage.instance and option.nodes < stage.nodes
        ]
        if fewer:
            yield with_stage(plan, index, max(fewer, key=lambda option: option.nodes))


def with_stage(plan: Plan, index: int, stage: StagePlan) -> Plan:
    return Plan((*plan.stages[:index], stage, *plan.stages[index + 1 :]))


def polish(plan: Plan, menus: Sequence[Menu], pool: PlanPool, key: Key = by_rank) -> Plan:
    """Change one stage, or two at once, as long as the plan improves."""
    while True:
        found = polish_stages(plan, menus, pool, key)
        found = pool.best([found, *_exchanges(found, menus)], key)
        if found == plan or key(pool.judge(found)) >= key(pool.judge(plan)):
            return plan
        plan = found


def polish_stages(plan: Plan, menus: Sequence[Menu], pool: PlanPool, key: Key = by_rank) -> Plan:
    """Change one stage after the other as long as the plan improves."""
    while True:
        before = plan
        for index, menu in enumerate(menus):
            idle = (replace(plan.stages[index], nodes=nodes) for nodes in _worth_keeping(plan, index))
            options = [with_stage(plan, index, option) for option in (*menu, *idle)]
            plan = pool.best([plan, *options], key)
        if plan == before:
            return plan


def _worth_keeping(plan: Plan, index: int) -> set[int]:
    """Larger node counts that a stage may keep, partly idle, because a neighbouring stage uses them."""
    stage = plan.stages[index]
    around = plan.stages[max(index - 1, 0) : index + 2]
    return {other.nodes for other in around if other.instance == stage.instance and other.nodes > stage.nodes}


def _exchanges(plan: Plan, menus: Sequence[Menu]) -> Iterator[Plan]:
    near = [_near(stage, menu) for stage, menu in zip(plan.stages, menus, strict=True)]
    for one, other in combinations(range(len(menus)), 2):
        for first in near[one]:
            for second in near[other]:
                yield with_stage(with_stage(plan, one, first), other, second)


def _near(stage: StagePlan, menu: Menu) -> Sequence[StagePlan]:
    own = [option for option in menu if option.instance == stage.instance]
    at = sum(1 for option in own if option.nodes < stage.nodes)
    return own[max(at - NEAR, 0) : at + NEAR + 1]
