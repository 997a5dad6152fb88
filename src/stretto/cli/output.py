"""Where results may be written."""

from __future__ import annotations

from pathlib import Path

from stretto.core.errors import InputError


def check_report(report: Path | None) -> None:
    """Refuse a report's place before work is done that would be lost."""
    if report is not None and report.is_dir():
        raise InputError(f"--report {report} is a folder.", remedy="Name a file, such as report.html.")
