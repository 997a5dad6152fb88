"""What the training script of a disturbed study wrote down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_train import SEEN


@dataclass(frozen=True, slots=True)
class Step:
    """One worker's part in one step."""

    job_id: str
    t_s: float
    pid: int
    mark: str
    step: int
    epoch: int
    saw: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """A state at the end of an epoch, and the stretches of training that led to it."""

    epoch: int
    """Epochs completed."""
    step: int
    loss: float
    stretches: tuple[tuple[str, int], ...]


def steps_of(run: Path, job_id: str | None = None) -> list[Step]:
    """Of one job or of all, in the order of time."""
    steps = [
        Step(
            path.parent.name,
            line["t_s"],
            line["pid"],
            line["mark"],
            line["step"],
            line["epoch"],
            tuple(line["saw"]),
        )
        for path in run.glob(f"jobs/{job_id or '*'}/{SEEN}")
        for line in _lines(path)
        if "saw" in line
    ]
    return sorted(steps, key=lambda step: step.t_s)


def ends_of(job: Path) -> list[End]:
    """Of every attempt, those that were lost again included."""
    return [
        End(
            line["ended"], line["step"], line["loss"], tuple((mark, step) for mark, step in line["stretches"])
        )
        for line in _lines(job / SEEN)
        if "ended" in line
    ]


def marks_of(run: Path, job_id: str | None) -> frozenset[str]:
    """The stretches that have begun."""
    return frozenset(step.mark for step in steps_of(run, job_id))


def last_step(job: Path) -> int:
    """The furthest step that was begun."""
    return max((line["step"] for line in _lines(job / SEEN)), default=0)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A line that is still being written is left out."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return map(json.loads, whole.splitlines())
