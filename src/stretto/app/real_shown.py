"""What the training code of a run has reported: the names of its metrics, and how far it came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stretto.app.run_folder import RunFolder, Tables

NOT_METRICS = frozenset({"epoch", "epoch_s", "t_s", "workers", "batch", "progress"})
"""What `metrics.jsonl` has beside what the training code reports."""
Metrics = dict[str, float | None]
"""Values by name, as somebody calls them; None: not a number."""
MOST_PRINTED = 100
"""Lines of a log that are looked at for the names of metrics."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the metrics files of a run hold."""

    names: list[str]
    """What the code of the jobs calls its metrics."""
    epochs: int
    """The latest epoch of any job."""


def shown_in(folder: RunFolder) -> Shown:
    """What has been reported so far."""
    names: dict[str, None] = {}
    epochs = 0
    for line in (line for path in sorted(folder.path.glob("jobs/*/metrics.jsonl")) for line in _lines(path)):
        names.update((name, None) for name in line if name not in NOT_METRICS)
        epoch = line.get("epoch")
        epochs = max(epochs, epoch) if isinstance(epoch, int) else epochs
    return Shown(list(names) or _printed(folder), epochs)


def metrics_by_epoch(folder: RunFolder, job_id: str) -> dict[int, Metrics]:
    """What a job reported after each of its epochs; of one that it repeated, the last time."""
    path = folder.metrics(job_id)
    found: dict[int, Metrics] = {}
    for line in _lines(path) if path.is_file() else ():
        if isinstance(epoch := line.get("epoch"), int):
            values = {name: value for name, value in line.items() if name not in NOT_METRICS}
            numbers = {name: value for name, value in values.items() if isinstance(value, float | int | None)}
            found.setdefault(epoch, {}).update(numbers)
    return found


def metrics_text(values: Metrics) -> str:
    """As people read them: accuracy 0.93, loss 0.21."""
    shown = ((name, "not a number" if value is None else f"{value:.6g}") for name, value in values.items())
    return ", ".join(f"{name} {value}" for name, value in shown)


def _printed(folder: RunFolder) -> list[str]:
    """What commands print in lines that are like reports, and have neither an epoch nor the metric."""
    names: dict[str, None] = {}
    for path in sorted(folder.path.glob("jobs/*/stdout.log")):
        for line in islice(_lines(path), MOST_PRINTED):
            names.update((name, None) for name in line if name not in NOT_METRICS)
    return list(names)


def _lines(path: Path) -> Iterator[Tables]:
    """Those that were written to their end."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text) if text.startswith("{") else None
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line
