"""The sentences of HyperSched's reasons: why a trial waits, is admitted, is cut or is resized."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from stretto.core.decision import Reason, ReasonCode
from stretto.core.units import counted
from stretto.policies.hypersched.memory import Rungs
from stretto.policies.trials import metric_text
from stretto.search.study import Direction, Study

NO_SLOT_FOR_NEW: Final = Reason(ReasonCode.WAITS, "No slot is free for a new trial.")
NO_TIME_FOR_NEW: Final = Reason(ReasonCode.WAITS, "Too little time is left to train a new trial.")
NO_SLOT_FOR_PAUSED: Final = Reason(ReasonCode.WAITS, "Paused: better trials have the slots.")
NO_TIME_FOR_PAUSED: Final = Reason(ReasonCode.WAITS, "Paused: too little time is left for another epoch.")


def paused_waits(study: Study) -> Reason:
    """Why a trial that was cut waits."""
    return Reason(ReasonCode.WAITS, f"Paused until it is {_holding(study)} and a slot is free.")


def in_time(left_s: float) -> str:
    return "without a deadline" if math.isinf(left_s) else f"in the {left_s:.0f} s left"


def why_new(left_s: float, *, spare: bool) -> str:
    """Why a new trial is admitted; `spare`: no other trial can use its slot."""
    return f"{_free(spare=spare)}: it trains {in_time(left_s)}."


def why_holding(study: Study, left_s: float, *, spare: bool) -> str:
    """Why a paused trial at or above its cut-offs is resumed."""
    return f"{_free(spare=spare)}: {_holding(study)}, it trains {in_time(left_s)}."


def why_best(study: Study, score: float | None, epoch: int, left_s: float, *, spare: bool) -> str:
    """Why a paused trial is resumed by its metric alone."""
    shown = f"{metric_text(study, score)} after epoch {epoch}"
    return f"{_free(spare=spare)}, and no better trial waits: {shown}, it trains {in_time(left_s)}."


def why_cut(study: Study, rungs: Rungs, trial: str, place: int) -> str:
    """Why a trial that fell at a rung is paused."""
    rung, cut = rungs.rungs[place], rungs.cutoff(place)
    shown = metric_text(study, rung.score(trial))
    bar = "no trial is promoted yet" if cut is None else f"the cut-off is {metric_text(study, cut)}"
    return f"{shown} at epoch {rungs.epochs[place]}, where {bar} ({len(rung)} trials)."


def why_resized(held: int, share: int, gain: float, left_s: float) -> str:
    """Why a trial gets more slots, or fewer because it trains faster on them."""
    makes = "makes" if share == 1 else "make"
    progress = f"{gain:.2f} times the progress {in_time(left_s)}"
    return f"{counted(share, 'slot')} instead of {held} {makes} {progress}."


def why_fewer(held: int, share: int, takers: Iterable[str]) -> str:
    """Why a trial gives slots up; `takers` are the trials that would gain by them."""
    names = ", ".join(takers)
    why = f"the rest is for {names}" if names else "that is its share now"
    return f"{counted(share, 'slot')} instead of {held}: {why}."


def _holding(study: Study) -> str:
    side = "above" if study.direction is Direction.MAX else "below"
    return f"at or {side} its cut-offs"


def _free(*, spare: bool) -> str:
    return "A slot is free that no other trial can use" if spare else "A slot is free"
