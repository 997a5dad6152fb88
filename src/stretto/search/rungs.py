"""Rungs: the epochs at which trials are compared, and the brackets of Hyperband."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from stretto.core.errors import InputError

Spacing = Literal["geometric", "additive"]


def make_rungs(spacing: Spacing, *, min_epochs: int, eta: int, max_epochs: int) -> tuple[int, ...]:
    """Cumulative epochs of all comparisons before `max_epochs`.

    geometric: r, r eta, r eta^2, ..; additive: each stage is r eta^i epochs long, so r, r + r eta, ..
    """
    _check(min_epochs, eta)
    rungs: list[int] = []
    stage_epochs = reached = min_epochs
    while reached < max_epochs:
        rungs.append(reached)
        stage_epochs *= eta
        reached = stage_epochs if spacing == "geometric" else reached + stage_epochs
    return tuple(rungs)


def check_rungs(rungs: Sequence[int], max_epochs: int, *, where: str = "") -> tuple[int, ...]:
    """Rungs as written, if they ascend from 1 or more and end below `max_epochs`."""
    last = 0
    for rung in rungs:
        if not last < rung < max_epochs:
            raise InputError(
                f"rung {rung} does not lie above {last} and below max_epochs {max_epochs}.",
                where=where,
                remedy="Write cumulative epochs in ascending order.",
            )
        last = rung
    return tuple(rungs)


def halving_epochs(trials: int, *, min_epochs: int, eta: int) -> int:
    """Cumulative epochs of SHA(n, r, eta) with additive rungs: where its last survivor ends.

    Stage i has n / eta^i trials, rounded down, for r eta^i epochs more.
    """
    _check(min_epochs, eta)
    stage_epochs = reached = min_epochs
    while trials > 1:
        trials //= eta
        stage_epochs *= eta
        reached += stage_epochs
    return reached


class Bracket(NamedTuple):
    """Some of a study's trials, and where they are first compared."""

    trials: int
    first_rung: int
    """Index in the study's rungs; their number means: never compared, trained to the end at once."""


def hyperband_brackets(rungs: Sequence[int], eta: int, trials: int | None = None) -> tuple[Bracket, ...]:
    """Hyperband's brackets, those with the most comparisons first.

    With s comparisons ahead a bracket has ceil((K + 1) / (s + 1) eta^s) trials, K being the number of rungs.
    `trials` shares out so many instead, in these proportions; brackets that get none are left out.
    """
    most = len(rungs)
    sizes = [-(-(most + 1) * eta**ahead // (ahead + 1)) for ahead in range(most, -1, -1)]
    if trials is not None:
        sizes = _share(trials, sizes)
    return tuple(Bracket(size, index) for index, size in enumerate(sizes) if size)


def _share(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of `total` in proportion, the largest remainders rounded up first."""
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _check(min_epochs: int, eta: int) -> None:
    if min_epochs < 1 or eta < 2:
        raise InputError(
            f"rungs cannot start at {min_epochs} epochs and grow by a factor of {eta}.",
            remedy="min_epochs is 1 or more, eta 2 or more.",
        )
