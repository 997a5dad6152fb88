"""Limits as people write them on the command line."""

from __future__ import annotations

import math
import re
import reprlib
from datetime import datetime

from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s

DAY_S = 86400.0
NO_LIMIT = "none"
OTHER_DEADLINES = f"; a time of day, 18:00; or {NO_LIMIT}"

_MONEY = re.compile(r"\$?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?", re.ASCII)
"""Commas stand between thousands only: 1,5 is not 15."""


_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)", re.ASCII)


def parse_deadline_s(text: str | None, now: datetime) -> float | None:
    """Seconds from now of a duration or of a time of day, which is the next of its kind; None of None.

    "none" is infinite: it lifts the deadline of a study's file.
    """
    if text is None or text.strip().lower() == NO_LIMIT:
        return None if text is None else math.inf
    if match := _TIME_OF_DAY.fullmatch(text.strip()):
        then = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
        return (then - now).total_seconds() % DAY_S or DAY_S
    deadline_s = parse_duration_s(text, where="--deadline", other_forms=OTHER_DEADLINES)
    if not 0 < deadline_s < math.inf:
        raise InputError(
            f"--deadline {reprlib.repr(text)} is not later than the start, or never comes.",
            remedy=f"Give one like 2h{OTHER_DEADLINES}.",
        )
    return deadline_s


def parse_budget_usd(text: str | None) -> float | None:
    """US dollars, with or without their sign, or None where no budget is given; "none" is infinite."""
    if text is None or text.strip().lower() == NO_LIMIT:
        return None if text is None else math.inf
    budget_usd = float(text.removeprefix("$").replace(",", "")) if _MONEY.fullmatch(text) else math.nan
    if not 0 < budget_usd < math.inf:
        raise InputError(
            f"--budget {reprlib.repr(text)} is not a sum of money.",
            remedy=f"Give US dollars, such as 60 or 1,500.50; or {NO_LIMIT}.",
        )
    return budget_usd
