"""A stage of a plan on fewer nodes than planned, because the others will not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.core.events import NodeRefused
from stretto.core.units import counted, format_duration
from stretto.planning.plan import StagePlan
from stretto.planning.tuning import Tuning
from stretto.policies.rubberband_outlook import steady_s

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


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


def again_at_s(refused_s: float, now_s: float, times: int, deadline_s: float | None) -> float:
    """When nodes that were all refused, so many times in a row, are asked for again.

    The pause doubles from time to time, but for a last try before the deadline; a run that was resumed
    has waited already.
    """
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 10), LONGEST_PAUSE_S)
    if deadline_s is not None:
        pause_s = min(pause_s, max((deadline_s - now_s) / 2.0, FIRST_PAUSE_S))
    return max(refused_s + pause_s, now_s + FIRST_PAUSE_S)


def again_text(times: int, at_s: float) -> str:
    """How often in a row that was, and when nodes are asked for again, in words."""
    often = f", {counted(times, 'time')} in a row" if times > 1 else ""
    return f"{often}; they are asked for again at {format_duration(at_s)}."
