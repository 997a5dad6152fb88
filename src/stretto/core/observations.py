"""Observations of running jobs, from which all beliefs are fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """Mean step and synchronisation time of one configuration since the last report."""

    nodes: int
    workers: int
    servers: int
    atomic: int
    """Examples per worker and pass."""
    step_s: float
    """Time of an optimisation step without accumulation passes: compute and synchronisation."""
    sync_s: float
    """The part of `step_s` spent waiting for the exchange of gradients."""


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """Gradient statistics at the initial batch size: squared norm, and trace of the covariance."""

    sqr: float
    var: float


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Training loss at the end of an epoch; None if it was not a number."""

    epoch: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a trial at the end of an epoch."""

    epoch: int
    value: float | None
    """The study's metric; None if it was not a number."""
    epoch_s: float | None
    """Time of the epoch; None if it was interrupted or the allocation changed during it."""
    workers: int
    nodes: int
