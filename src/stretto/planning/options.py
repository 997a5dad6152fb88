"""What a stage may be given: fair allocations; and the plans that others are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stretto.planning.execution import Execution
from stretto.planning.packing import roomy_nodes, tight_nodes
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.tuning import Tuning
from stretto.pricing.billing import Per
from stretto.pricing.instances import Instance
from stretto.search.study import Stage

Menu = tuple[StagePlan, ...]
"""The options of one stage that may be worth taking."""
MOST_SIZES = 128
"""Sizes of fixed clusters that are looked at; where there may be more nodes, those sizes are spread evenly by
their logarithm."""


def fair_options(stage: Stage, instance: Instance, most_gpus: int, max_nodes: int) -> Iterator[StagePlan]:
    """Equal GPUs for every trial: all at once, or one GPU each in waves as even as can be.

    For a number of waves it takes the fewest trials at once, which divide the trials where that is possible.
    A multiple is offered on the fewest nodes that have the GPUs, and on the fewest where nobody spans nodes
    without need.
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
    """For every stage the options that no other of the same instance type beats in every respect."""
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
        # Waves that leave room for more of them on the same nodes only take longer.
        if option.gpus_per_trial > 1 or option.at_once == fullest[option.nodes]
    ]


def _undominated(
    tuning: Tuning, execution: Execution, index: int, options: Sequence[StagePlan]
) -> Iterator[StagePlan]:
    """Fewest nodes first; what is held costs money per instance, what is used per function."""
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
    """Every fixed cluster, but those with a node that is of no use in any stage."""
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
    """What a stage does with so many nodes: the fastest fair allocation, or waves as large as they fit.

    Such waves need not divide the trials: that is how people use a fixed cluster.
    """
    gpus = nodes * instance.gpus
    if gpus < menu[0].trials:
        return replace(menu[0], gpus_per_trial=1, at_once=gpus, nodes=nodes)
    return max((option for option in menu if option.nodes <= nodes), key=lambda option: option.nodes)


def naive_elastic_plans(tuning: Tuning, stages: Sequence[Stage]) -> Iterator[Plan]:
    """A cluster that shrinks with the trials: every trial has the same number of GPUs to the end."""
    for instance in tuning.instances:
        for gpus in range(1, tuning.profile.scaling.most_gpus + 1):
            options = [list(_on(stage, instance, gpus, stage.trials, tuning.max_nodes)) for stage in stages]
            if all(options):
                yield Plan(tuple(choices[-1] for choices in options))
