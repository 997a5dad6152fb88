"""Every example runs, and prints what its checked-in output says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.with_suffix(".py") for path in FOLDER.glob("*.out"))


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"processes", "simulate"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout == path.with_suffix(".out").read_text(encoding="utf-8")


def test_the_training_example_trains_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "digits.py"), "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("epoch 1: accuracy 0.")
