"""Promising plans by dynamic programming over the stages, on mean times and costs.

The state is what a stage holds, and time is cut into equal parts. For every time there is a plan that costs
least in the mean among those that end by then: candidates, to be looked at sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.core.units import HOUR_S
from stretto.planning.execution import Execution
from stretto.planning.forecast import Progress
from stretto.planning.options import Menu
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.profile import Floats
from stretto.planning.tuning import Tuning
from stretto.pricing.billing import Per

Ints = npt.NDArray[np.intp]
TIMES = 200
"""Parts of the time to the horizon."""


@dataclass(frozen=True, slots=True)
class Steps:
    """From each option of one stage (rows) to each of the next (columns), in the mean."""

    duration_s: Floats
    cost_usd: Floats


def mean_steps(
    tuning: Tuning, menus: Sequence[Menu], execution: Execution, start: Progress | None
) -> tuple[Steps, ...]:
    """What going from option to option takes; the first has one row, for what is held at the start."""
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
    """Duration and cost of an option by the number of nodes it is handed; minimum charges are left out."""
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
    """For every time up to the horizon the plan that costs least in the mean, the fastest first."""
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
    """Least cost by (option, time) after one more stage, and which option came before."""
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
