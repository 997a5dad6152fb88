"""Plans that were looked at, and how well each keeps the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from stretto.planning.execution import Execution, PlanRun
from stretto.planning.plan import Plan
from stretto.planning.profile import Floats
from stretto.planning.tuning import Limits


@dataclass(frozen=True, slots=True)
class Standing:
    """A plan in short: what it takes, and how it compares."""

    finish_s: float
    cost_usd: float
    due_s: float
    """The earliest deadline it keeps."""
    due_usd: float
    """The least budget it keeps."""
    excess: float
    """By which parts of what it takes it misses the limits; 0 if it keeps them."""
    wanted: float
    """What is to be as small as possible among plans that keep the limits."""

    @property
    def rank(self) -> tuple[float, float]:
        """The smaller, the better."""
        return self.excess, self.wanted


Key = Callable[[Standing], tuple[float, ...]]
"""What makes one plan better than another: the smaller, the better."""


def rank(standing: Standing) -> tuple[float, ...]:
    """As the limits demand."""
    return standing.rank


def speed(standing: Standing) -> tuple[float, ...]:
    """The earlier it can promise to end, the better."""
    return standing.due_s, standing.cost_usd


def cost(standing: Standing) -> tuple[float, ...]:
    """The cheaper, the better."""
    return standing.cost_usd, standing.due_s


@dataclass(frozen=True, slots=True)
class Goal:
    """Which plan is best: the cheapest by a deadline, the fastest within a budget.

    With both limits it is the cheapest, and with none the one with the least product of time and money.
    """

    limits: Limits
    by_mean: bool = False
    """Keep the limits in the mean, as the paper does, rather than with probability q."""

    def judge(self, run: PlanRun) -> Standing:
        finish_s, cost_usd = float(run.finish_s.mean()), float(run.cost_usd.mean())
        due_s, due_usd = self._due(run.finish_s, finish_s), self._due(run.cost_usd, cost_usd)
        deadline_s, budget_usd = self.limits.deadline_s, self.limits.budget_usd
        excess = _excess(due_s, deadline_s) + _excess(due_usd, budget_usd)
        if deadline_s is not None:
            wanted = cost_usd
        else:
            wanted = finish_s if budget_usd is not None else finish_s * cost_usd
        return Standing(finish_s, cost_usd, due_s, due_usd, excess, wanted)

    def _due(self, values: Floats, mean: float) -> float:
        """The smallest x with P(value <= x) >= q."""
        if self.by_mean:
            return mean
        position = math.ceil(self.limits.q * len(values) - 1e-9) - 1
        return float(np.partition(values, max(position, 0))[max(position, 0)])


def _excess(due: float, limit: float | None) -> float:
    return 0.0 if limit is None or due <= limit else (due - limit) / due


class Pool:
    """Judges plans on one set of samples and remembers them.

    `fixed`: as clusters that nobody manages, of which no node is given back before the end.
    """

    def __init__(self, execution: Execution, goal: Goal, *, fixed: bool = False) -> None:
        self.execution = execution
        self.goal = goal
        self.fixed = fixed
        self.seen: dict[Plan, Standing] = {}

    def judge(self, plan: Plan) -> Standing:
        standing = self.seen.get(plan)
        if standing is None:
            standing = self.seen[plan] = self.goal.judge(self.run(plan))
        return standing

    def run(self, plan: Plan) -> PlanRun:
        return self.execution.run(plan, to_the_end=self.fixed)

    def best(self, plans: Iterable[Plan], key: Key = rank) -> Plan:
        """The best of these plans; the first among equals."""
        return min(plans, key=lambda plan: key(self.judge(plan)))

    def ordered(self, plans: Iterable[Plan]) -> list[Plan]:
        """These plans, the best first."""
        return sorted(plans, key=lambda plan: self.judge(plan).rank)

    def frontier(self) -> list[Plan]:
        """Plans that no other beats both in the deadline it keeps and in mean cost, fastest first."""
        front: list[Plan] = []
        cheapest = math.inf
        for plan, standing in sorted(self.seen.items(), key=lambda item: (item[1].due_s, item[1].cost_usd)):
            if standing.cost_usd < cheapest:
                cheapest = standing.cost_usd
                front.append(plan)
        return front
