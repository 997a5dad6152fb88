"""Flags that several commands share, and how their values are read."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s

Seed = Annotated[int, typer.Option(help="Root of all random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Slots = Annotated[
    int | None, typer.Option(help="Workers at once.", show_default="one for every GPU, else for every core")
]
On = Annotated[str, typer.Option(metavar="PLACE", help="Where it trains: local, ray or ray:ADDRESS.")]
Store = Annotated[
    str, typer.Option(metavar="URL", help="Keep checkpoints there too, for every node.", show_default=False)
]
ReportFile = Annotated[Path | None, typer.Option(help="Write an HTML report here.", show_default=False)]
InFolder = Annotated[
    bool, typer.Option("--in-folder", help="Each command runs in a folder of its job's own.")
]


DAY_S = 86400.0
NO_LIMIT = "none"
OTHER_DEADLINES = f"; a time of day, 18:00; or {NO_LIMIT}"

_MONEY = re.compile(r"\$?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?", re.ASCII)
"""Commas stand between thousands only: 1,5 is not 15."""


_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)", re.ASCII)


def parse_deadline_s(text: str | None, now: datetime) -> float | None:
    """Seconds from now until a duration is over or a time of day comes next; None for None.

    "none" is infinite: it removes the deadline of a study's file.
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
    """US dollars, with or without $; None for None; "none" is infinite."""
    if text is None or text.strip().lower() == NO_LIMIT:
        return None if text is None else math.inf
    budget_usd = float(text.removeprefix("$").replace(",", "")) if _MONEY.fullmatch(text) else math.nan
    if not 0 < budget_usd < math.inf:
        raise InputError(
            f"--budget {reprlib.repr(text)} is not a sum of money.",
            remedy=f"Give US dollars, such as 60 or 1,500.50; or {NO_LIMIT}.",
        )
    return budget_usd


def work_of(words: Sequence[str]) -> str | tuple[str, ...] | None:
    """What to train: a single word that names a file or a function is an entry, anything else a command."""
    if len(words) == 1 and (":" in words[0] or words[0].endswith(".py")):
        return words[0]
    return tuple(words) or None


def check_report(report: Path | None) -> None:
    """InputError if the report cannot be written, before any work is done."""
    if report is not None:
        check_place(report, option="--report", example="report.html")


def check_place(path: Path, *, option: str, example: str) -> None:
    """InputError if no file can be written there; missing folders are made later."""
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder.", remedy=f"Name a file, such as {example}.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "may not be written in" if above.is_dir() else "is not a folder"
        raise InputError(
            f"{option} {path} cannot be written: {above} {what}.", remedy="Name a file somewhere else."
        )


def nothing_to_replay(run: Path) -> InputError:
    """The error for a run that reported no epoch."""
    return InputError(
        "finished no epoch, so there is nothing to replay.", where=str(run), remedy="Let it run longer."
    )
