"""Where results may be written."""

from __future__ import annotations

import os
from pathlib import Path

from stretto.core.errors import InputError


def check_report(report: Path | None) -> None:
    """Refuse a report's place before work is done that would be lost."""
    if report is not None:
        check_place(report, option="--report", example="report.html")


def check_place(path: Path, *, option: str, example: str) -> None:
    """Refuse a place where no file can be written; folders on the way to it are made later."""
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder.", remedy=f"Name a file, such as {example}.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "may not be written in" if above.is_dir() else "is not a folder"
        raise InputError(
            f"{option} {path} cannot be written: {above} {what}.", remedy="Name a file somewhere else."
        )
