"""Limits as callers of the Python functions give them."""

from __future__ import annotations

import math

from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s

_DEADLINE = "Give seconds, or a text such as 90s, 20m or 1h30m; math.inf for none."
_BUDGET = "Give US dollars; math.inf for none."


def given_deadline_s(deadline: float | str | None) -> float | None:
    """Seconds of a number or a text; None of None, which leaves the deadline of the file."""
    try:
        given_s = parse_duration_s(deadline) if isinstance(deadline, str) else deadline
    except InputError as error:
        raise InputError(error.problem, where="deadline", remedy=_DEADLINE) from error
    return _above_0(given_s, "deadline", _DEADLINE)


def deadline_words(deadline: float | str | None) -> str | None:
    """A deadline as it would be written in a command, by which a run is resumed; None of None."""
    if deadline is None or isinstance(deadline, str):
        return deadline
    return "none" if deadline == math.inf else f"{deadline:.6f}".rstrip("0").rstrip(".")


def given_budget_usd(budget_usd: float | None) -> float | None:
    """US dollars; None of None, which leaves the budget of the file."""
    return _above_0(budget_usd, "budget_usd", _BUDGET)


def _above_0(value: object, where: str, remedy: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{value!r} is not a number above 0.", where=where, remedy=remedy)
    return float(value)
