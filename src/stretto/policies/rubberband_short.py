"""A stage of a plan on fewer nodes than planned, because the others will not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.core.events import NodeRefused
from stretto.planning.plan import StagePlan
from stretto.planning.tuning import Tuning
from stretto.policies.rubberband_outlook import steady_s


def on_fewer(tuning: Tuning, stage: StagePlan, trials: int, nodes: int, slowness: float) -> StagePlan:
    """The stage on so many nodes, as fast as its trials that are left get through it there.

    Each of them gets fewer GPUs, or they take turns, whichever is done first; time is money here, since
    the nodes are given.
    """
    gpus = nodes * tuning.instance(stage.instance).gpus
    options = [
        replace(stage, trials=trials, gpus_per_trial=each, at_once=min(trials, gpus // each), nodes=nodes)
        for each in range(1, min(stage.gpus_per_trial, gpus) + 1)
    ]
    held = (stage.instance, nodes)
    best = min(options, key=lambda option: steady_s(tuning, [option], held, slowness))
    return replace(best, trials=stage.trials)


def refusal_text(refusals: Sequence[NodeRefused], refused: int, planned: int) -> str:
    """What did not come and why, in words."""
    why = "; ".join(dict.fromkeys(refusal.why for refusal in refusals))
    return f"{refused} of {planned} nodes were refused ({why})"
