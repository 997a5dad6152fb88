"""How fast trials are, as HyperSched believes: start times, and speed by GPUs; told, learned or assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

from stretto.planning.profile import Scaling

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
