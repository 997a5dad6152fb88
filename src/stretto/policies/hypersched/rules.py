"""HyperSched's options, and whether a start or a resize still pays by the deadline."""

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
"""The profile's speed-up; the same, corrected by the epochs that were seen; as many times as GPUs."""


def startup_s(ascending: Sequence[float]) -> float:
    """The 90th percentile of start times, between neighbours in proportion; 0 of none."""
    if not ascending:
        return 0.0
    place = (len(ascending) - 1) * 0.9
    below = int(place)
    high = ascending[min(below + 1, len(ascending) - 1)]
    return ascending[below] + (high - ascending[below]) * (place - below)


def believed_scaling(
    belief: ScalingBelief, given: Scaling, gpus: int, speedups: Mapping[str, Sequence[float]]
) -> Scaling:
    """Speed by GPUs, of which there are `gpus`; `speedups` has those seen, by number of GPUs as text."""
    if belief == "linear":
        return Scaling(((1, 1.0), (gpus, float(gpus)))) if gpus > 1 else Scaling(((1, 1.0),))
    if belief == "given" or not speedups:
        return given
    seen = sorted((int(count), median(times)) for count, times in speedups.items())
    return _corrected(given, [(1, 1.0), *seen])


def most_useful(scaling: Scaling, gpus: int) -> int:
    """The fewest GPUs that reach the highest speed of up to `gpus`: where speed bends, or all."""
    most = scaling.most_gpus
    if most <= gpus:
        return most
    return max(
        {gpus, *(count for count, _ in scaling.points if count < gpus)},
        key=lambda count: (scaling.speedup(count), -count),
    )


def _corrected(given: Scaling, seen: Sequence[tuple[int, float]]) -> Scaling:
    """The speed-up that was seen, and elsewhere the given one times a factor.

    The factor is seen / given; between two numbers of GPUs that were seen its logarithm is linear in that of
    GPUs, and beyond the last it stays.
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


AUTO = -1
"""Leave it to `published`."""
GAIN = 1.1
"""A larger allocation must bring this many times the progress by the deadline."""


@dataclass(frozen=True, kw_only=True)
class HyperSchedOptions:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """What is believed of every resize that could be asked for now."""

    scaling: Scaling
    left_s: float
    startup_s: float
    """How long a trial stands still for a resize."""
    whole_epochs: bool
    """Only epochs that end by the deadline count; else, as published, progress alone."""

    def gain(self, held: int, share: int, *, wait_s: float = 0.0) -> float:
        """Times the progress from `wait_s` to the deadline; without bound for a trial that stands still."""
        if not held:
            return math.inf
        speeds = self.scaling.speedup(held), self.scaling.speedup(share)
        return resize_gain(*speeds, self.left_s - wait_s, self.startup_s)

    def is_worth(self, single_s: float, held: int, share: int, *, wait_s: float = 0.0) -> bool:
        """Whether a trial whose epochs take `single_s` on one GPU should be resized `wait_s` from now."""
        if self.gain(held, share, wait_s=wait_s) <= GAIN:
            return False
        if not self.whole_epochs:
            return True
        epoch_s = single_s / self.scaling.speedup(held) if held else math.inf
        new_epoch_s = single_s / self.scaling.speedup(share)
        return ends_more_epochs(epoch_s, new_epoch_s, self.left_s - wait_s, self.startup_s)

    def why_not(self, held: int, share: int) -> str:
        """Why a trial is not resized, at one of its results."""
        stays = f"Stays on {counted(held, 'slot')}:"
        if share < held and self.scaling.speedup(share) <= self.scaling.speedup(held):
            return f"{stays} no other trial would come further with some of them {self._by_then}."
        resize = f"with {share}, after a resize of {self._startup}, it would"
        if self.gain(held, share) > GAIN:
            return f"{stays} {resize} end no more epochs in the {self.left_s:.0f} s left."
        return f"{stays} {resize} make less than {GAIN:g} times the progress {self._by_then}."

    @property
    def _by_then(self) -> str:
        return "without a deadline" if math.isinf(self.left_s) else "by the deadline"

    @property
    def _startup(self) -> str:
        return f"{self.startup_s:.0f} s" if self.startup_s >= 10.0 else f"{self.startup_s:.2g} s"
