"""Durations, amounts of money, sizes and counts, in the form in which users read and write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stretto.core.errors import InputError

HOUR_S = 3600.0

_UNIT_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)")
_AFTER_UNIT = re.compile(r"(?<=[dhms]) +(?=\d)")


def parse_duration_s(text: str, *, where: str = "", other_forms: str = "") -> float:
    """Seconds of `90`, `90s`, `20m`, `1h30m` or `1h 30m`; an error also offers `other_forms`."""
    compact = _AFTER_UNIT.sub("", text.strip().lower())
    parts = _PART.findall(compact)
    mixed = len(parts) > 1 and any(not unit for _, unit in parts)
    if not parts or mixed or "".join(number + unit for number, unit in parts) != compact:
        raise InputError(
            f"{text!r} is not a duration.",
            where=where,
            remedy=f"Write seconds or units: 90, 20m, 1h30m{other_forms}.",
        )
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 slot, 2 slots."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Compact and readable: 45s, 12m 05s, 3h 20m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_usd(usd: float) -> str:
    """To the cent, $1,234.50; amounts below ten cents to two digits, $0.0031."""
    size = abs(usd)
    digits = _digits(size)
    whole, point, fraction = f"{size:,.{digits}f}".partition(".")
    return f"{'-' if usd < 0 else ''}${whole}{point}{fraction.rstrip('0'):0<2}"


def shown_usd_above(usd: float) -> float:
    """The amount rounded up to one that `format_usd` shows without rounding."""
    digits = _digits(usd)
    return math.ceil(usd * 10.0**digits) / 10.0**digits


def _digits(usd: float) -> int:
    return 2 if usd == 0 or usd >= 0.1 else min(1 - math.floor(math.log10(usd)), 6)


def format_size(size_bytes: float) -> str:
    """A file size to three digits: 512 B, 1.21 MB, 45.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.3g} TB"


def several(names: Sequence[str], most: int = 10) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
