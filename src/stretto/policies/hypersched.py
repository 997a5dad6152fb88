"""HyperSched: the best model by a deadline on a fixed cluster.

Rungs: a trial that falls below the present cut-off of any rung it passed is paused at its next result, and
resumed once it is at or above all of them again. Admission: trials are started and resumed only while a
newcomer could still be trained eta times as long as the longest-running one; from then on the pool only
shrinks. Reallocation: every running trial has one GPU; those left over are shared out, and a trial takes
its share, at one of its results, when the speed it gains until the deadline is worth the restart.

As published, everything that does not run when admission closes is stopped. Here it waits: GPUs that the
pool could not use even at its largest go on with new trials and then with paused ones, the best first; and
no trial is cut whose GPUs would then be idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from stretto.core.decision import Decision
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, Memory
from stretto.policies.common import check_option
from stretto.policies.hypersched_notes import Notes
from stretto.policies.hypersched_speed import ScalingBelief
from stretto.policies.hypersched_turn import Rules, Turn
from stretto.policies.trials import TUNING_EVENTS, Share

AUTO = -1
"""Leave it to `published`."""


@dataclass(frozen=True, kw_only=True)
class HyperSched:
    """Tunes a study for the best model at its deadline."""

    name: ClassVar[str] = "hypersched"
    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS
    tuning: Tuning
    interval_s: float = 60.0
    published: bool = False
    """When admission closes, stop everything that does not run, and cut trials even if GPUs stay idle."""
    share: Literal["auto", "none", "uniform", "top"] = "auto"
    """Who gets GPUs that are left over; auto: the best trial, or, as published, everybody in turn."""
    scaling: Literal["auto", "given", "learned", "linear"] = "auto"
    """Speed by GPUs: the profile's; that, corrected by the epochs seen; or as many times as GPUs.

    auto: learned, or, as published, given.
    """
    recharge: int = AUTO
    """A trial shows more results than this between two resizes; -1: 1, or, as published, 5.

    What a resize must bring to be worth its restart already keeps trials from being resized for nothing;
    waiting for results costs most where a deadline leaves few of them.
    """
    grid: int = 0
    """Trials are resized to at most this many GPUs or to multiples of it; 0: to any number."""
    score_window: int = 1
    """Trials are compared by the mean of so many last results."""
    retrospective: bool = True
    """Hold trials to the present cut-offs of rungs they passed, not to those of the time they passed them."""
    overhead: bool = True
    """Reckon with the time a start takes."""
    admission: bool = True
    """Start no trial that could not be trained long enough."""

    def __post_init__(self) -> None:
        for option, value, least in (
            ("recharge", self.recharge, AUTO),
            ("grid", self.grid, 0),
            ("score_window", self.score_window, 1),
        ):
            check_option(self.name, option, value, value >= least, f"{least} or more")

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        notes = Notes.load(self.tuning.study, retrospective=self.retrospective, memory=memory)
        turn = Turn(self.tuning, self._rules, view, notes)
        news = turn.hear()
        turn.close()
        turn.cut(news)
        turn.turn_away()
        turn.fill()
        turn.resize(news)
        return turn.decision(), notes.dump()

    @property
    def _rules(self) -> Rules:
        share: Share = ("uniform" if self.published else "top") if self.share == "auto" else self.share
        scaling: ScalingBelief = (
            ("given" if self.published else "learned") if self.scaling == "auto" else self.scaling
        )
        recharge = (5 if self.published else 1) if self.recharge == AUTO else self.recharge
        return Rules(
            share=share,
            scaling=scaling,
            recharge=recharge,
            grid=self.grid,
            score_window=self.score_window,
            overhead=self.overhead,
            admission=self.admission,
            published=self.published,
        )
