"""What the benchmarks share: where data is, and how a line of result looks."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_HELPERS = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "faults")]
"""Folders that a benchmark adds to `sys.path` to use the helpers of the tests."""


def data_folder(name: str) -> Path | None:
    """A folder of public data, or None if it is missing (STRETTO_DATA, default ../shared/data)."""
    folder = Path(os.environ.get("STRETTO_DATA", ROOT.parent / "shared" / "data")) / name
    return folder if folder.is_dir() else None


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"
