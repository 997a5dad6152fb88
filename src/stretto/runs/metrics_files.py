"""The metrics that a run's training code has reported, read from its files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stretto.runs.folder import RunFolder, Tables
from stretto.system.plain_json import UnreadableError, parse_json

NOT_METRICS = frozenset({"epoch", "epoch_s", "t_s", "workers", "batch", "progress"})
"""Keys of `metrics.jsonl` that are not metrics."""
Metrics = dict[str, float | None]
"""Values by name; None: the value was not a number."""
MOST_PRINTED = 100
"""The most lines of a log that are searched for names of metrics."""
TAIL_BYTES = 2**14
"""The part of a metrics file that is read for its last epochs."""


@dataclass(frozen=True, slots=True)
class ReportedMetrics:
    """What the jobs of a run have reported."""

    names: list[str]
    """The names of the metrics."""
    epochs: int
    """The latest epoch of any job."""


def reported_metrics(folder: RunFolder) -> ReportedMetrics:
    """What the jobs have reported so far."""
    names: dict[str, None] = {}
    epochs = 0
    for line in (line for path in sorted(folder.path.glob("jobs/*/metrics.jsonl")) for line in _lines(path)):
        names.update((name, None) for name in line if name not in NOT_METRICS)
        epoch = line.get("epoch")
        epochs = max(epochs, epoch) if isinstance(epoch, int) else epochs
    return ReportedMetrics(list(names) or _printed(folder), epochs)


def never_numeric(folder: RunFolder, metric: str) -> str | None:
    """A metric's first value if none of its values is a number or null; otherwise None."""
    paths = sorted(folder.path.glob("jobs/*/metrics.jsonl"))
    values = [line[metric] for path in paths for line in _lines(path) if metric in line]
    if not values or any(value is None or _is_number(value) for value in values):
        return None
    return repr(str(values[0])[:40])


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def metrics_by_epoch(folder: RunFolder, job_id: str) -> dict[int, Metrics]:
    """What a job reported after each epoch; for a repeated epoch, the last report."""
    path = folder.metrics(job_id)
    return _by_epoch(_lines(path)) if path.is_file() else {}


def metrics_after(folder: RunFolder, job_id: str, epoch: int) -> Metrics:
    """What a job reported after one of its last epochs. Only the end of its file is read."""
    path = folder.metrics(job_id)
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            texts = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    return _by_epoch(_parsed(texts)).get(epoch, {})


def _by_epoch(lines: Iterable[Tables]) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {}
    for line in lines:
        if isinstance(epoch := line.get("epoch"), int):
            values = {name: value for name, value in line.items() if name not in NOT_METRICS}
            found.setdefault(epoch, {}).update(_numbers(values))
    return found


def _numbers(values: Tables) -> Iterator[tuple[str, float | None]]:
    for name, value in values.items():
        if value is None or isinstance(value, float | int):
            is_finite = value is not None and abs(value) <= sys.float_info.max
            yield name, value if is_finite else None


def metrics_text(values: Metrics) -> str:
    """Text such as: accuracy 0.93, loss 0.21."""
    shown = ((name, "not a number" if value is None else f"{value:.6g}") for name, value in values.items())
    return ", ".join(f"{name} {value}" for name, value in shown)


def _printed(folder: RunFolder) -> list[str]:
    """Names in printed lines that look like reports but have neither an epoch nor the metric."""
    names: dict[str, None] = {}
    for path in sorted(folder.path.glob("jobs/*/stdout.log")):
        for line in islice(_lines(path), MOST_PRINTED):
            names.update((name, None) for name in line if name not in NOT_METRICS)
    return list(names)


def _lines(path: Path) -> Iterator[Tables]:
    """The complete lines of a file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from _parsed(file)


def _parsed(texts: Iterable[str]) -> Iterator[Tables]:
    for text in texts:
        try:
            line = parse_json(text, finite=False) if text.startswith("{") else None
        except UnreadableError:
            continue
        if isinstance(line, dict):
            yield line
