"""Study files for tests: the example, cut down so that a simulation takes a moment."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stretto.inputs.study import EXAMPLE_STUDY, StudyFile, parse_study
from stretto.journal.base import Journal
from stretto.simulation.studies import StudyRun, simulate_study
from stretto.worlds.curve_files import load_curves

TUNING_POLICIES = ("hypersched", "asha", "sha", "hyperband", "rubberband", "random")


def edited(text: str, *edits: tuple[str, str]) -> str:
    """With replacements, each of something that is there once."""
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


SMALL_STUDY = edited(
    EXAMPLE_STUDY,
    ("trials = 64", "trials = 8"),
    ("max_epochs = 508", "max_epochs = 28"),
    ('deadline = "2h"', 'deadline = "40m"'),
    ("budget_usd = 120", "budget_usd = 30"),
    ("max_nodes = 16", "max_nodes = 4"),
    ("\nnodes = 4 ", "\nnodes = 2 "),
)
"""8 trials, compared after 4 and 12 of 28 epochs, on 2 nodes of 4 GPUs, or up to 4 rented ones."""

NO_LIMITS = edited(SMALL_STUDY, ('deadline = "40m"', ""), ("budget_usd = 30", ""))
TWICE_AS_SLOW = edited(
    SMALL_STUDY, ('curves = "builtin:resnet"', 'curves = "builtin:resnet"\nepoch_s = { mean = 70, sd = 6 }')
)
"""Epochs really take twice as long as is believed."""
MUCH_FASTER = edited(SMALL_STUDY, ('curves = "builtin:resnet"', 'curves = "builtin:resnet"\nepoch_s = 5'))


def with_table(text: str, curves: str) -> str:
    """The study on a table of curves in which less is better."""
    return edited(
        text,
        ('curves = "builtin:resnet"', f'curves = "{curves}"'),
        ('direction = "max" ', 'direction = "min" '),
    )


def curve_table(values: dict[str, list[str]]) -> str:
    """A CSV file of curves: the values of each trial, epoch by epoch."""
    rows = [f"{trial},{i + 1},{value}" for trial, curve in values.items() for i, value in enumerate(curve)]
    return "\n".join(["trial,epoch,value", *rows, ""])


def study_file(text: str, path: Path = Path("study.toml")) -> StudyFile:
    return parse_study(text, path)


def run(
    policy: str,
    text: str = SMALL_STUDY,
    *,
    seed: int = 0,
    journal: Journal | None = None,
    folder: Path = Path(),
) -> StudyRun:
    file = study_file(text, folder / "study.toml")
    curves = load_curves(file.world.curves, folder=folder, direction=file.tuning.study.direction)
    return simulate_study(file, curves, policy, seed=seed, journal=journal)


@cache
def cached_run(policy: str, text: str = SMALL_STUDY, seed: int = 0) -> StudyRun:
    """The same simulation for many tests that only look at it."""
    return run(policy, text, seed=seed)
