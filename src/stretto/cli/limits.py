"""Limits as people write them on the command line."""

from __future__ import annotations

import math
import re
import reprlib

from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s

_MONEY = re.compile(r"\$?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?", re.ASCII)
"""Commas stand between thousands only: 1,5 is not 15."""


def parse_deadline_s(text: str | None) -> float | None:
    """Seconds from the start, or None where no deadline is given."""
    if text is None:
        return None
    deadline_s = parse_duration_s(text, where="--deadline")
    if not 0 < deadline_s < math.inf:
        raise InputError(
            f"--deadline {reprlib.repr(text)} is not later than the start, or never comes.",
            remedy="Give one like 2h.",
        )
    return deadline_s


def parse_budget_usd(text: str | None) -> float | None:
    """US dollars, with or without their sign, or None where no budget is given."""
    if text is None:
        return None
    budget_usd = float(text.removeprefix("$").replace(",", "")) if _MONEY.fullmatch(text) else math.nan
    if not 0 < budget_usd < math.inf:
        raise InputError(
            f"--budget {reprlib.repr(text)} is not a sum of money.",
            remedy="Give US dollars, such as 60 or 1,500.50.",
        )
    return budget_usd
