"""The model of a step's time, fitted to what a probe timed, and how far it is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.core.observations import SpeedSample
from stretto.models.speed import AllReduceSpeed, fit_all_reduce

LEAST_OTHERS = 3
"""Points that a model is fitted to when another is left out."""


def fit_speed(speeds: Sequence[SpeedSample]) -> AllReduceSpeed | None:
    """The model of a step's time; None of no steps."""
    return fit_all_reduce(speeds) if speeds else None


@dataclass(frozen=True, slots=True)
class FitError:
    """How far the model is from one measured step time, relative to it."""

    sample: SpeedSample
    fitted_s: float
    residual: float
    left_out: float | None
    """The error of a model fitted to all others; None: too few others, or none with as many workers."""


def fit_errors(speeds: Sequence[SpeedSample]) -> tuple[FitError, ...]:
    """The model's error on every measured point, and on each when it is left out."""
    model = fit_speed(speeds)
    if model is None:
        return ()
    errors = []
    for sample in speeds:
        fitted_s = _step_s(model, sample)
        others = [one for one in speeds if one is not sample]
        known = len(others) >= LEAST_OTHERS and any(one.workers == sample.workers for one in others)
        left_out = _step_s(fit_all_reduce(others), sample) / sample.step_s - 1.0 if known else None
        errors.append(FitError(sample, fitted_s, fitted_s / sample.step_s - 1.0, left_out))
    return tuple(errors)


def _step_s(model: AllReduceSpeed, sample: SpeedSample) -> float:
    return float(model.step_s(sample.nodes, sample.workers, sample.atomic))
