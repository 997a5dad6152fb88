"""HyperSched's options, and what it asks of the deadline: whether a start or a resize still pays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from stretto.policies.common import EPS, check_option
from stretto.policies.hypersched_speed import ScalingBelief
from stretto.policies.trials import Share

AUTO = -1
"""Leave it to `published`."""
GAIN = 1.1
"""A larger allocation must bring this many times the progress by the deadline."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How HyperSched is set."""

    name: ClassVar[str] = "hypersched"
    published: bool = False
    """When admission closes, stop everything that does not run, and cut trials even if GPUs stay idle.

    Resize for progress that no epoch comes of by the deadline, and take GPUs that nobody gains by.
    """
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

    @property
    def sharing(self) -> Share:
        if self.share == "auto":
            return "uniform" if self.published else "top"
        return self.share

    @property
    def belief(self) -> ScalingBelief:
        if self.scaling == "auto":
            return "given" if self.published else "learned"
        return self.scaling

    @property
    def results_between(self) -> int:
        if self.recharge == AUTO:
            return 5 if self.published else 1
        return self.recharge


def time_needed_s(eta: int, longest_s: float, startup_s: float, full_training_s: float) -> float:
    """Time a newcomer must have: eta times what the longest-running trial had, or a full training.

    min(eta * (t_longest - t_startup), R * t_epoch on one GPU)
    """
    return min(eta * (longest_s - startup_s), full_training_s)


def catch_up_s(farthest: int, epoch_s: float, startup_s: float) -> float:
    """Time in which a newcomer can come as far as the farthest trial has.

    t_startup + E * t_epoch on as many GPUs as it can use
    """
    return startup_s + farthest * epoch_s


def resize_gain(speed: float, new_speed: float, left_s: float, startup_s: float) -> float:
    """Progress by the deadline with the new speed, after the restart, over that without a resize.

    s(new) * (T_left - t_startup) / (s(now) * T_left); 0 if the restart takes all the time that is left.
    """
    if left_s <= startup_s:
        return 0.0
    return new_speed / speed * (1.0 - startup_s / left_s)


def ends_more_epochs(epoch_s: float, new_epoch_s: float, left_s: float, startup_s: float) -> bool:
    """Whether a trial at the beginning of an epoch ends more of them by the deadline if it is resized.

    floor((T_left - t_startup) / t_epoch(new)) > floor(T_left / t_epoch(now)); without a deadline, the faster.
    """
    if math.isinf(left_s):
        return new_epoch_s < epoch_s
    return _ended(left_s - startup_s, new_epoch_s) > _ended(left_s, epoch_s)


def _ended(time_s: float, epoch_s: float) -> int:
    return max(math.floor(time_s / epoch_s + EPS), 0)


def on_grid(gpus: int, grid: int) -> int:
    """The most GPUs, up to so many, that are at most the grid or a multiple of it; all without a grid (0)."""
    return gpus if grid == 0 or gpus <= grid else gpus - gpus % grid
