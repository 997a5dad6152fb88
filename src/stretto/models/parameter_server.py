"""How fast a job with parameter servers steps: the models of Optimus, and their online fit.

With p servers and w workers, and a total batch of M examples, f steps per second follow

    synchronous     1/f = theta0 M/w + theta1 + theta2 w/p + theta3 w + theta4 p
    asynchronous    w/f = theta0 + theta1 w/p + theta2 w + theta3 p

The terms are computing, a constant, exchanging gradients, and the cost of each further worker and server.
Every theta >= 0. Both forms are linear in theta and are fitted by non-negative least squares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stretto.core.observations import SpeedSample
from stretto.models.speed import Floats, Numbers

Configuration = tuple[int, int]
"""(servers, workers)."""

SYNCHRONOUS_TERMS = ("batch per worker", "constant", "workers per server", "workers", "servers")
ASYNCHRONOUS_TERMS = SYNCHRONOUS_TERMS[1:]

MIN_SINGULAR = 1e-3
"""If samples vary this much less in a direction than in their main one, it is not identified: noise would be
amplified a thousandfold."""
MIN_SHARE = 0.05
"""Terms whose thetas can replace each other at least this much are named together in a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeed:
    """Speed of one job for any number of servers and workers."""

    thetas: tuple[float, ...]
    """Seconds, in the order of the formula: five if synchronous, else four."""
    synchronous: bool
    total_batch: int
    """M; the asynchronous form does not depend on it."""

    def steps_per_s(self, servers: Numbers, workers: Numbers) -> Floats:
        """Steps of the whole job per second; arrays broadcast. 0 without a server or a worker."""
        p, w = np.maximum(servers, 1.0), np.maximum(workers, 1.0)
        terms = _terms(p, w, self.total_batch, synchronous=self.synchronous)
        time_s = np.asarray(sum(theta * term for theta, term in zip(self.thetas, terms, strict=True)))
        speed = (1.0 if self.synchronous else w) / time_s
        return np.where(np.minimum(servers, workers) < 1, 0.0, speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeedFit:
    """The model that fits the samples best, and how far it can be trusted."""

    model: ServerSpeed
    identified: bool
    """Whether the samples determine every theta."""
    warning: str = ""
    """If not identified: the terms that the samples cannot separate, and the remedy."""
    relative_error: float = 0.0
    """Root mean square of the relative error of step times."""
    measured: Mapping[Configuration, float] = field(default_factory=dict)
    """Measured steps per second, by configuration."""

    def steps_per_s(self, servers: Numbers, workers: Numbers) -> Floats:
        """Measured speed for configurations that were run, else the model's; arrays broadcast."""
        speed = np.array(self.model.steps_per_s(servers, workers))
        for (p, w), seen in self.measured.items():
            speed[np.equal(servers, p) & np.equal(workers, w)] = seen
        return speed


def fit_server_speed(
    samples: Iterable[SpeedSample], *, synchronous: bool, total_batch: int
) -> ServerSpeedFit | None:
    """Fit the model to step times by non-negative least squares on their relative error.

    Each configuration counts once, with its mean. Samples without servers (of an all-reduce job of the same
    application) or without a positive time are ignored; None if no samples are left.
    """
    step_s = _mean_step_s(samples)
    if not step_s:
        return None
    servers, workers = np.array(list(step_s), dtype=float).T
    target_s = np.array(list(step_s.values())) * (1.0 if synchronous else workers)
    terms = np.column_stack(_terms(servers, workers, total_batch, synchronous=synchronous))
    weighted = terms / target_s[:, None]
    # Columns of unit length: otherwise the units would decide what counts as identified.
    lengths = np.linalg.norm(weighted, axis=0)
    scaled, residual = _nnls(weighted / lengths)
    warning = _warning(weighted / lengths, ratios=len(set((workers / servers).tolist())))
    return ServerSpeedFit(
        model=ServerSpeed(
            thetas=tuple((scaled / lengths).tolist()), synchronous=synchronous, total_batch=total_batch
        ),
        identified=not warning,
        warning=warning,
        relative_error=residual / math.sqrt(len(step_s)),
        measured={configuration: 1.0 / seconds for configuration, seconds in step_s.items()},
    )


def _terms(servers: Floats, workers: Floats, total_batch: int, *, synchronous: bool) -> tuple[Floats, ...]:
    """The factor of each theta."""
    both = (np.ones_like(servers * workers), workers / servers, workers, servers)
    return (total_batch / workers, *both) if synchronous else both


def _mean_step_s(samples: Iterable[SpeedSample]) -> dict[Configuration, float]:
    seen: defaultdict[Configuration, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.servers >= 1 and sample.workers >= 1 and 0.0 < sample.step_s < math.inf:
            seen[sample.servers, sample.workers].append(sample.step_s)
    return {configuration: sum(times) / len(times) for configuration, times in sorted(seen.items())}


def _nnls(design: Floats) -> tuple[Floats, float]:
    """Non-negative weights that bring all rows closest to 1, and the norm of the residual."""
    from scipy.optimize import nnls  # noqa: PLC0415  (slow to import, and only parameter-server jobs need it)

    weights, residual = nnls(design, np.ones(len(design)))
    return weights, float(residual)


def _warning(design: Floats, *, ratios: int) -> str:
    """A warning if the rank of the design matrix is not full; otherwise empty."""
    rows, columns = design.shape
    _, singular, directions = np.linalg.svd(design, full_matrices=True)
    rank = int(np.sum(singular > MIN_SINGULAR * singular[0]))
    if rank == columns:
        return ""
    names = SYNCHRONOUS_TERMS if columns == len(SYNCHRONOUS_TERMS) else ASYNCHRONOUS_TERMS
    mixed = "; ".join(
        f"{', '.join(names[i] for i in others)} and {names[last]}"
        for *others, last in _trading_groups(directions[rank:], columns)
    )
    return (
        f"{rows} configuration(s) with {ratios} worker:server ratio(s) do not determine the {columns} terms "
        f"of the speed model: they cannot tell apart {mixed}. "
        "Sample configurations with other worker:server ratios."
    )


def _trading_groups(null_space: Floats, columns: int) -> list[list[int]]:
    """Groups of terms that can replace each other without changing any sampled step time."""
    linked = np.abs(null_space.T @ null_space) > MIN_SHARE
    groups: list[list[int]] = []
    left = set(range(columns))
    while left:
        group, frontier = set[int](), {min(left)}
        while frontier:
            group |= frontier
            frontier = {j for i in frontier for j in np.flatnonzero(linked[i]).tolist()} - group
        left -= group
        if len(group) > 1:
            groups.append(sorted(group))
    return groups
