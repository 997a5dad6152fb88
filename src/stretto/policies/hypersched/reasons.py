"""HyperSched's reasons in words: why a trial waits, is let in or is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from stretto.core.decision import Reason, ReasonCode
from stretto.core.units import counted
from stretto.policies.hypersched.memory import Rungs
from stretto.policies.trials import metric_text
from stretto.search.study import Direction, Study

NEW_WAITS: Final = Reason(ReasonCode.WAITS, "No slot is free for a new trial, or too little time is left.")
OUTDONE_WAITS: Final = Reason(
    ReasonCode.WAITS, "Paused: better trials have the slots, or too little time is left for another epoch."
)


def paused_waits(study: Study) -> Reason:
    """For a trial that was cut."""
    return Reason(ReasonCode.WAITS, f"Paused until it is {_holding(study)} and a slot is free.")


def in_time(left_s: float) -> str:
    return "without a deadline" if math.isinf(left_s) else f"in the {left_s:.0f} s left"


def why_new(left_s: float, *, spare: bool) -> str:
    """Why a new trial is let in; `spare`: nobody else could use what it gets."""
    return f"{_free(spare=spare)}: it trains {in_time(left_s)}."


def why_holding(study: Study, left_s: float, *, spare: bool) -> str:
    """Why a paused trial that holds its own is let in."""
    return f"{_free(spare=spare)}: {_holding(study)}, it trains {in_time(left_s)}."


def why_best(study: Study, score: float | None, epoch: int, left_s: float, *, spare: bool) -> str:
    """Why a paused trial is let in by its metric alone."""
    shown = f"{metric_text(study, score)} after epoch {epoch}"
    return f"{_free(spare=spare)}, and nobody better waits: {shown}, it trains {in_time(left_s)}."


def why_cut(study: Study, rungs: Rungs, trial: str, place: int) -> str:
    """Why a trial that fell at a rung is paused."""
    rung, cut = rungs.rungs[place], rungs.cutoff(place)
    shown = metric_text(study, rung.score(trial))
    bar = "nobody goes on yet" if cut is None else f"the cut-off is {metric_text(study, cut)}"
    return f"{shown} at epoch {rungs.epochs[place]}, where {bar} ({len(rung)} trials)."


def why_resized(held: int, share: int, gain: float, left_s: float) -> str:
    """Why a trial's slots become more, or fewer, for its own sake."""
    makes = "makes" if share == 1 else "make"
    progress = f"{gain:.2f} times the progress {in_time(left_s)}"
    return f"{counted(share, 'slot')} instead of {held} {makes} {progress}."


def why_fewer(held: int, share: int, takers: Iterable[str]) -> str:
    """Why a trial gives slots up; `takers` are those who would gain by them."""
    names = ", ".join(takers)
    why = f"the rest is for {names}" if names else "that is its share now"
    return f"{counted(share, 'slot')} instead of {held}: {why}."


def _holding(study: Study) -> str:
    side = "above" if study.direction is Direction.MAX else "below"
    return f"at or {side} its cut-offs"


def _free(*, spare: bool) -> str:
    return "A slot is free that no other trial can use" if spare else "A slot is free"
