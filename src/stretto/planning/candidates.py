"""Candidate plans, and the pool that compares them.

- Options of a stage: fair allocations, the same GPUs for every trial.
- Candidates: fixed clusters, and dynamic programming over the stages. Its state is the nodes held and the
  time, in equal steps; for every end time it finds the plan with the least mean cost.
- The pool judges plans on Monte Carlo samples, by the user's limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stretto.core.units import HOUR_S
from stretto.planning.execution import Execution, Ints, PlanRun
from stretto.planning.forecast import StudyProgress
from stretto.planning.plan import Plan, StagePlan, roomy_nodes, tight_nodes
from stretto.planning.profile import Floats
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Per
from stretto.pricing.instances import Instance
from stretto.search.study import Stage

Menu = tuple[StagePlan, ...]
"""The options of one stage."""
MOST_SIZES = 128
"""How many sizes of fixed clusters are considered; of more sizes, this many in geometric steps."""
TIMES = 200
"""Time steps up to the horizon."""


def fair_options(stage: Stage, instance: Instance, most_gpus: int, max_nodes: int) -> Iterator[StagePlan]:
    """Equal GPUs for every trial: all trials at once, or one GPU each in waves.

    Waves are as even as possible: for each number of waves, the fewest trials at once. Each option is offered
    on the fewest nodes with enough GPUs, and on the fewest where no trial spans nodes without need.
    """
    for at_once in sorted({-(-stage.trials // waves) for waves in range(2, stage.trials + 1)}):
        yield from _on(stage, instance, 1, at_once, max_nodes)
    for gpus in range(1, min(most_gpus, max_nodes * instance.gpus // stage.trials) + 1):
        yield from _on(stage, instance, gpus, stage.trials, max_nodes)


def _on(stage: Stage, instance: Instance, gpus: int, at_once: int, max_nodes: int) -> Iterator[StagePlan]:
    counts = {size(gpus, at_once, instance.gpus) for size in (tight_nodes, roomy_nodes)}
    for nodes in sorted(counts):
        if nodes <= max_nodes:
            yield StagePlan(
                first_epoch=stage.first_epoch,
                last_epoch=stage.last_epoch,
                trials=stage.trials,
                gpus_per_trial=gpus,
                at_once=at_once,
                nodes=nodes,
                instance=instance.name,
            )


def menus_of(tuning: Tuning, stages: Sequence[Stage], execution: Execution) -> tuple[Menu, ...]:
    """By stage: the options that no other option of the same instance type beats in every respect."""
    return tuple(
        tuple(
            option
            for instance in tuning.instances
            for option in _undominated(tuning, execution, index, _options(tuning, stage, instance))
        )
        for index, stage in enumerate(stages)
    )


def _options(tuning: Tuning, stage: Stage, instance: Instance) -> list[StagePlan]:
    options = list(fair_options(stage, instance, tuning.profile.scaling.most_gpus, tuning.max_nodes))
    fullest = {option.nodes: option.at_once for option in options if option.gpus_per_trial == 1}
    return [
        option
        for option in options
        # Waves that leave GPUs idle only take longer.
        if option.gpus_per_trial > 1 or option.at_once == fullest[option.nodes]
    ]


def _undominated(
    tuning: Tuning, execution: Execution, index: int, options: Sequence[StagePlan]
) -> Iterator[StagePlan]:
    """Options, fewest nodes first, that beat all smaller ones in duration or, per function, in GPU time."""
    measured = []
    for option in options:
        run = execution.stage(index, option, option.nodes)
        used = float(run.gpu_s.mean()) if tuning.billing.per is Per.FUNCTION else 0.0
        measured.append((option.nodes, float(run.duration_s.mean()), used, option))
    measured.sort(key=lambda row: row[:3])
    kept: list[tuple[float, float]] = []
    for _, duration_s, used_s, option in measured:
        if not any(other[0] <= duration_s and other[1] <= used_s for other in kept):
            kept.append((duration_s, used_s))
            yield option


def static_plans(menus: Sequence[Menu], tuning: Tuning) -> Iterator[Plan]:
    """Every fixed cluster without nodes that are useless in all stages."""
    for instance in tuning.instances:
        own = [[option for option in menu if option.instance == instance.name] for menu in menus]
        last: list[StagePlan] = []
        for nodes in _sizes(tuning.max_nodes):
            stages = [_make_most_of(menu, nodes, instance) for menu in own]
            if stages != last:
                yield Plan(tuple(replace(stage, nodes=nodes) for stage in stages))
            last = stages


def _sizes(max_nodes: int) -> Sequence[int]:
    if max_nodes <= MOST_SIZES:
        return range(1, max_nodes + 1)
    return sorted({round(size) for size in np.geomspace(1, max_nodes, MOST_SIZES).tolist()})


def _make_most_of(menu: Sequence[StagePlan], nodes: int, instance: Instance) -> StagePlan:
    """How a fixed cluster is used in a stage: the fastest fair allocation, or the largest waves that fit.

    These waves need not divide the trials evenly.
    """
    gpus = nodes * instance.gpus
    if gpus < menu[0].trials:
        return replace(menu[0], gpus_per_trial=1, at_once=gpus, nodes=nodes)
    return max((option for option in menu if option.nodes <= nodes), key=lambda option: option.nodes)


def naive_elastic_plans(tuning: Tuning, stages: Sequence[Stage]) -> Iterator[Plan]:
    """Clusters that shrink with the number of trials: each trial has the same GPUs in all stages."""
    for instance in tuning.instances:
        for gpus in range(1, tuning.profile.scaling.most_gpus + 1):
            options = [list(_on(stage, instance, gpus, stage.trials, tuning.max_nodes)) for stage in stages]
            if all(options):
                yield Plan(tuple(choices[-1] for choices in options))


@dataclass(frozen=True, slots=True)
class Steps:
    """Means of going from each option of one stage (rows) to each option of the next (columns)."""

    duration_s: Floats
    cost_usd: Floats


def mean_steps(
    tuning: Tuning, menus: Sequence[Menu], execution: Execution, start: StudyProgress | None
) -> tuple[Steps, ...]:
    """The steps between stages; the first has one row, for the nodes held at the start."""
    before: Menu | None = None
    steps = []
    for index, menu in enumerate(menus):
        columns = []
        for option in menu:
            free = execution.free_nodes(option.instance)
            handed = (
                [start.held(option.instance) if start else 0]
                if before is None
                else [max(last.nodes if last.instance == option.instance else 0, free) for last in before]
            )
            kept = np.minimum(handed, option.nodes)
            columns.append(_mean_column(tuning, execution, index, option, kept))
        duration_s, cost_usd = (np.stack(parts, axis=1) for parts in zip(*columns, strict=True))
        steps.append(Steps(duration_s, cost_usd))
        before = menu
    return tuple(steps)


def _mean_column(
    tuning: Tuning, execution: Execution, index: int, option: StagePlan, kept: Ints
) -> tuple[Floats, Floats]:
    """Duration and cost of an option by the number of nodes kept for it; without minimum charges."""
    duration_s = execution.mean_durations(index, option)[kept]
    new = option.nodes - kept
    if tuning.billing.per is Per.FUNCTION:
        gpu_s = float(execution.stage(index, option, option.nodes).gpu_s.mean())
        cost_usd = np.full(len(kept), gpu_s * execution.usd_per_gpu_s(option))
    else:
        price = tuning.instance(option.instance).usd_per_hour / HOUR_S
        rented = max(1.0 - execution.free_nodes(option.instance) / option.nodes, 0.0)
        node_usd = rented * price * execution.mean_node_s(index, option)[kept]
        cost_usd = node_usd + tuning.own_usd_per_s * duration_s
    return duration_s, cost_usd + new * tuning.billing.usd_per_new_node


def candidate_plans(menus: Sequence[Menu], steps: Sequence[Steps], horizon_s: float) -> list[Plan]:
    """For every time up to the horizon the plan with the least mean cost, the fastest first."""
    width_s = horizon_s / TIMES
    taken = [_in_times(step.duration_s / width_s) for step in steps]
    cost = np.zeros((1, TIMES + 1))
    chosen: list[Ints] = []
    for step, times in zip(steps, taken, strict=True):
        cost, previous = _next_stage(cost, step.cost_usd, times)
        chosen.append(previous)
    plans: dict[Plan, None] = {}
    for time in range(TIMES + 1):
        option = int(cost[:, time].argmin())
        if np.isfinite(cost[option, time]):
            plans[_trace(menus, taken, chosen, option, time)] = None
    return list(plans)


def _in_times(steps: Floats) -> Ints:
    return np.minimum(np.rint(steps), TIMES + 1).astype(np.intp)


def _next_stage(cost: Floats, step_usd: Floats, taken: Ints) -> tuple[Floats, Ints]:
    """Least cost by (option, time) after one more stage, and the option of the stage before."""
    times = np.arange(TIMES + 1)
    padded = np.hstack([cost, np.full((len(cost), 1), np.inf)])
    rows = np.arange(len(cost))[:, None]
    costs, previous = [], []
    for option in range(step_usd.shape[1]):
        begun = times[None, :] - taken[:, option, None]
        total = padded[rows, np.where(begun < 0, TIMES + 1, begun)] + step_usd[:, option, None]
        best = total.argmin(axis=0)
        previous.append(best)
        costs.append(total[best, times])
    return np.array(costs), np.array(previous)


def _trace(
    menus: Sequence[Menu], taken: Sequence[Ints], chosen: Sequence[Ints], option: int, time: int
) -> Plan:
    stages = []
    for menu, times, previous in zip(reversed(menus), reversed(taken), reversed(chosen), strict=True):
        stages.append(menu[option])
        before = int(previous[option, time])
        time -= int(times[before, option])
        option = before
    return Plan(tuple(reversed(stages)))


@dataclass(frozen=True, slots=True)
class PlanScore:
    """The means of a plan, and how it compares with others."""

    finish_s: float
    cost_usd: float
    due_s: float
    """The earliest deadline it keeps."""
    due_usd: float
    """The least budget it keeps."""
    excess: float
    """Relative amount by which it misses the limits; 0 if it keeps them."""
    wanted: float
    """What is minimised among plans that keep the limits."""


Key = Callable[[PlanScore], tuple[float, ...]]
"""Orders plans; smaller is better."""


def by_rank(score: PlanScore) -> tuple[float, ...]:
    """Keeping the limits comes first, then the objective."""
    return score.excess, score.wanted


def by_end(score: PlanScore) -> tuple[float, ...]:
    """The earlier the end that it can promise, the better."""
    return score.due_s, score.cost_usd


def by_cost(score: PlanScore) -> tuple[float, ...]:
    """The cheaper, the better."""
    return score.cost_usd, score.due_s


@dataclass(frozen=True, slots=True)
class Objective:
    """Which plan is best: the cheapest that meets the deadline, or the fastest within the budget.

    With both limits it is the cheapest, without limits the one with the least product of time and cost.
    """

    limits: Limits
    by_mean: bool = False
    """Keep the limits on average, as in the paper, instead of with probability q."""

    def judge(self, run: PlanRun) -> PlanScore:
        finish_s, cost_usd = float(run.finish_s.mean()), float(run.cost_usd.mean())
        due_s, due_usd = self._due(run.finish_s, finish_s), self._due(run.cost_usd, cost_usd)
        deadline_s, budget_usd = self.limits.deadline_s, self.limits.budget_usd
        excess = _excess(due_s, deadline_s) + _excess(due_usd, budget_usd)
        if deadline_s is not None:
            wanted = cost_usd
        else:
            wanted = finish_s if budget_usd is not None else finish_s * cost_usd
        return PlanScore(finish_s, cost_usd, due_s, due_usd, excess, wanted)

    def _due(self, values: Floats, mean: float) -> float:
        """The smallest x with P(value <= x) >= q."""
        if self.by_mean:
            return mean
        position = math.ceil(self.limits.q * len(values) - 1e-9) - 1
        return float(np.partition(values, max(position, 0))[max(position, 0)])


def _excess(due: float, limit: float | None) -> float:
    return 0.0 if limit is None or due <= limit else (due - limit) / due


class PlanPool:
    """Judges plans on one set of samples and remembers their scores.

    `fixed`: treat plans as fixed clusters, which keep all nodes to the end.
    """

    def __init__(self, execution: Execution, objective: Objective, *, fixed: bool = False) -> None:
        self.execution = execution
        self.objective = objective
        self.fixed = fixed
        self.seen: dict[Plan, PlanScore] = {}

    def judge(self, plan: Plan) -> PlanScore:
        score = self.seen.get(plan)
        if score is None:
            score = self.seen[plan] = self.objective.judge(self.run(plan))
        return score

    def run(self, plan: Plan) -> PlanRun:
        return self.execution.run(plan, to_the_end=self.fixed)

    def best(self, plans: Iterable[Plan], key: Key = by_rank) -> Plan:
        """The best of these plans; the first among equals."""
        return min(plans, key=lambda plan: key(self.judge(plan)))

    def ordered(self, plans: Iterable[Plan]) -> list[Plan]:
        """These plans, the best first."""
        return sorted(plans, key=lambda plan: by_rank(self.judge(plan)))

    def frontier(self) -> list[Plan]:
        """Plans that no other beats in both deadline kept and mean cost, fastest first."""
        front: list[Plan] = []
        cheapest = math.inf
        for plan, score in sorted(self.seen.items(), key=lambda item: (item[1].due_s, item[1].cost_usd)):
            if score.cost_usd < cheapest:
                cheapest = score.cost_usd
                front.append(plan)
        return front
