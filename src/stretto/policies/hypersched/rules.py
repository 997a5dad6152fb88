"""HyperSched's options, and its rules of time: when admission closes, and whether a resize still pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Literal

from stretto.core.units import counted
from stretto.planning.profile import Scaling
from stretto.policies.common import EPS, check_option
from stretto.policies.trials import Share

ScalingBelief = Literal["given", "learned", "linear"]
"""The profile's speed-up; that speed-up corrected by measured epochs; or proportional to the GPUs."""
AUTO = -1
"""The default, which depends on `published`."""
LEAST_GAIN = 1.1
"""A resize must bring more than this many times the progress by the deadline."""


@dataclass(frozen=True, kw_only=True)
class HyperSchedOptions:
    """The options of HyperSched."""

    name: ClassVar[str] = "hypersched"
    published: bool = False
    """Follow the paper where we differ from it.

    Stop all paused and new trials when admission closes, and cut trials even if GPUs then idle. Resize for
    part of an epoch, and take GPUs from a trial even if no other trial gains by them.
    """
    share: Literal["auto", "none", "uniform", "top"] = "auto"
    """Who gets spare GPUs; auto: the best trial (published: all in turn)."""
    scaling: Literal["auto", "given", "learned", "linear"] = "auto"
    """Speed by GPUs: given is the profile's, learned corrects it by measured epochs, linear is proportional.

    auto: learned (published: given).
    """
    recharge: int = AUTO
    """A trial must report more results than this between two resizes; -1: 1 (published: 5).

    A low number is enough, since a resize must be worth its restart anyway. Waiting for results costs most
    when few epochs are left before the deadline.
    """
    grid: int = 0
    """Trials are resized to at most this many GPUs or to multiples of it; 0: to any number."""
    score_window: int = 1
    """Trials are compared by the mean of this many last results."""
    retrospective: bool = True
    """Compare trials with the current cut-offs of the rungs they passed, not with the cut-offs back then."""
    overhead: bool = True
    """Take start-up time into account."""
    admission: bool = True
    """Start no trial that cannot train long enough before the deadline."""

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
    """Admission needs this much time: eta times that of the longest-running trial, or a full training.

    min(eta * (t_longest - t_startup), R * t_epoch on one GPU)
    """
    return min(eta * (longest_s - startup_s), full_training_s)


def catch_up_s(farthest: int, epoch_s: float, startup_s: float) -> float:
    """Time in which a newcomer reaches the epoch of the farthest trial, on as many GPUs as it can use.

    t_startup + E * t_epoch
    """
    return startup_s + farthest * epoch_s


def resize_gain(speed: float, new_speed: float, left_s: float, startup_s: float) -> float:
    """Progress by the deadline with a resize, restart included, relative to progress without it.

    s(new) * (T_left - t_startup) / (s(now) * T_left); 0 if the restart takes all the time left
    """
    if left_s <= startup_s:
        return 0.0
    return new_speed / speed * (1.0 - startup_s / left_s)


def ends_more_epochs(epoch_s: float, new_epoch_s: float, left_s: float, startup_s: float) -> bool:
    """Whether a trial at the start of an epoch completes more epochs by the deadline if it is resized.

    floor((T_left - t_startup) / t_epoch(new)) > floor(T_left / t_epoch(now)). Without a deadline: whether
    it gets faster.
    """
    if math.isinf(left_s):
        return new_epoch_s < epoch_s
    return _ended(left_s - startup_s, new_epoch_s) > _ended(left_s, epoch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """Whether a start or a resize pays by the deadline."""

    scaling: Scaling
    left_s: float
    startup_s: float
    """The restart penalty: how long a trial stops for a resize."""
    whole_epochs: bool
    """Count only epochs that end by the deadline; otherwise, as published, count any progress."""

    def gain(self, held: int, share: int, *, wait_s: float = 0.0) -> float:
        """Progress from `wait_s` to the deadline relative to no resize; infinite for a trial without GPUs."""
        if not held:
            return math.inf
        speeds = self.scaling.speedup(held), self.scaling.speedup(share)
        return resize_gain(*speeds, self.left_s - wait_s, self.startup_s)

    def is_worth(self, single_s: float, held: int, share: int, *, wait_s: float = 0.0) -> bool:
        """Whether a trial whose epochs take `single_s` on one GPU should be resized `wait_s` from now."""
        if self.gain(held, share, wait_s=wait_s) <= LEAST_GAIN:
            return False
        if not self.whole_epochs:
            return True
        epoch_s = single_s / self.scaling.speedup(held) if held else math.inf
        new_epoch_s = single_s / self.scaling.speedup(share)
        return ends_more_epochs(epoch_s, new_epoch_s, self.left_s - wait_s, self.startup_s)

    def why_not(self, held: int, share: int) -> str:
        """Why a trial is not resized at one of its results."""
        stays = f"Stays on {counted(held, 'slot')}:"
        if share < held and self.scaling.speedup(share) <= self.scaling.speedup(held):
            return f"{stays} no other trial would get further with some of them {self._by_then}."
        resize = f"with {share}, after a resize of {self._startup}, it would"
        if self.gain(held, share) > LEAST_GAIN:
            return f"{stays} {resize} complete no more epochs in the {self.left_s:.0f} s left."
        return f"{stays} {resize} make less than {LEAST_GAIN:g} times the progress {self._by_then}."

    @property
    def _by_then(self) -> str:
        return "without a deadline" if math.isinf(self.left_s) else "by the deadline"

    @property
    def _startup(self) -> str:
        return f"{self.startup_s:.0f} s" if self.startup_s >= 10.0 else f"{self.startup_s:.2g} s"


def on_grid(gpus: int, grid: int) -> int:
    """`gpus`, rounded down to a multiple of the grid if it is larger than the grid; 0 means no grid."""
    return gpus if grid == 0 or gpus <= grid else gpus - gpus % grid


def startup_s(ascending: Sequence[float]) -> float:
    """The 90th percentile of start times, interpolated; 0 if there are none."""
    if not ascending:
        return 0.0
    place = (len(ascending) - 1) * 0.9
    below = int(place)
    high = ascending[min(below + 1, len(ascending) - 1)]
    return ascending[below] + (high - ascending[below]) * (place - below)


def believed_scaling(
    belief: ScalingBelief, given: Scaling, gpus: int, speedups: Mapping[str, Sequence[float]]
) -> Scaling:
    """Speed by number of GPUs, up to `gpus`; `speedups` has the measured ones, with the number as text."""
    if belief == "linear":
        return Scaling(((1, 1.0), (gpus, float(gpus)))) if gpus > 1 else Scaling(((1, 1.0),))
    if belief == "given" or not speedups:
        return given
    seen = sorted((int(count), median(times)) for count, times in speedups.items())
    return _corrected(given, [(1, 1.0), *seen])


def most_useful(scaling: Scaling, gpus: int) -> int:
    """The fewest GPUs that reach the highest speed possible with `gpus`."""
    most = scaling.most_gpus
    if most <= gpus:
        return most
    return max(
        {gpus, *(count for count, _ in scaling.points if count < gpus)},
        key=lambda count: (scaling.speedup(count), -count),
    )


def _corrected(given: Scaling, seen: Sequence[tuple[int, float]]) -> Scaling:
    """The measured speed-ups, and between and beyond them the given ones times a factor.

    The factor is measured / given. Between two measured numbers of GPUs its logarithm is linear in the
    logarithm of GPUs; beyond the last it is constant.
    """
    known = dict(seen)
    factors = [(count, math.log(speed / given.speedup(count))) for count, speed in seen]
    points = dict(seen)
    for count, speed in given.points:
        if count not in known:
            points[count] = speed * math.exp(_between(factors, count))
    return Scaling(tuple(sorted(points.items())))


def _between(factors: Sequence[tuple[int, float]], gpus: int) -> float:
    below = factors[0]
    for point in factors:
        if point[0] > gpus:
            part = math.log(gpus / below[0]) / math.log(point[0] / below[0])
            return below[1] + (point[1] - below[1]) * part
        below = point
    return below[1]


def _ended(time_s: float, epoch_s: float) -> int:
    return max(math.floor(time_s / epoch_s + EPS), 0)
