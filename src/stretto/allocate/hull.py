"""Shares out GPUs when every job has a menu of sizes: a multiple-choice knapsack.

Each job offers choices (GPUs, value). We take exactly one choice of each job, keep the GPUs within the
capacity and maximise the sum of values.

Consider the relaxed problem, in which the last choice may be taken in part. There, only choices on the upper
concave hull of (GPUs, value) matter. On a concave hull the steps of a job have falling value per GPU, so the
optimum is found by walking all hulls at once, always taking the step with the largest value per GPU. The
walk stops at the first step that does not fit. Its part is all that is missing to the relaxed optimum:

    value(walk) <= value(best) <= value(walk) + slope of the step that did not fit * GPUs left

Smaller steps that still fit are then taken, which can only help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Choice = tuple[int, float]
"""(GPUs, value)."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of the walk: the index of each job's choice, and an upper bound of any answer's value."""

    chosen: list[int]
    value: float
    bound: float


def upper_hull(choices: Sequence[Choice]) -> list[int]:
    """Indices of the choices on the upper concave hull, by rising GPUs.

    It starts at the smallest choice and ends at the highest value: a larger choice of lower value is never
    worth its GPUs.
    """
    order = sorted(range(len(choices)), key=lambda i: (choices[i][0], -choices[i][1]))
    hull: list[int] = []
    for i in order:
        gpus, value = choices[i]
        if hull and (gpus == choices[hull[-1]][0] or value <= choices[hull[-1]][1]):
            continue
        while len(hull) >= 2:
            (g0, v0), (g1, v1) = choices[hull[-2]], choices[hull[-1]]
            if (v1 - v0) * (gpus - g1) > (value - v1) * (g1 - g0):
                break
            hull.pop()
        hull.append(i)
    return hull


def hull_walk(
    menus: Sequence[Sequence[Choice]], capacity: int, hulls: Sequence[Sequence[int]] | None = None
) -> Walk:
    """Take one choice of each menu within `capacity`. The smallest choices of all menus must fit together.

    `hulls`: the upper hulls of the menus, if the caller has them already.
    """
    if hulls is None:
        hulls = [upper_hull(menu) for menu in menus]
    chosen = [hull[0] for hull in hulls]
    left = capacity - sum(menu[choice][0] for menu, choice in zip(menus, chosen, strict=True))
    value = sum(menu[choice][1] for menu, choice in zip(menus, chosen, strict=True))
    steps = sorted(
        (
            (-(menu[b][1] - menu[a][1]) / (menu[b][0] - menu[a][0]), job, position)
            for job, (menu, hull) in enumerate(zip(menus, hulls, strict=True))
            for position, (a, b) in enumerate(pairwise(hull))
        )
    )
    bound: float | None = None
    reached = [0] * len(menus)
    for negative_slope, job, position in steps:
        if reached[job] != position:
            continue
        menu, hull = menus[job], hulls[job]
        gpus = menu[hull[position + 1]][0] - menu[hull[position]][0]
        if gpus > left:
            if bound is None:
                bound = value - negative_slope * left
            continue
        reached[job] += 1
        chosen[job] = hull[position + 1]
        left -= gpus
        value -= negative_slope * gpus
    return Walk(chosen, value, value if bound is None else bound)
