"""What studies came to, policy by policy, for a terminal and for pasting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from stretto.app.study_run import StudyResult
from stretto.core.units import format_duration, format_usd
from stretto.report.text_table import markdown_table
from stretto.search.study import Direction, Study

HEADING = ("policy", "best", "worst seed", "trials", "GPU hours", "cost", "finished", "ended by")


def study_text(study: Study, results: Sequence[StudyResult]) -> str:
    """A row for each policy: means over its seeds."""
    by_policy: dict[str, list[StudyResult]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    seeds = len(next(iter(by_policy.values())))
    deadline_s = results[0].deadline_s
    until = "without a deadline" if deadline_s is None else f"until {format_duration(deadline_s)}"
    over = "one simulation" if seeds == 1 else f"means of {seeds} simulations"
    title = f"{study.name}: best {study.metric} ({study.direction}) {until}, {over}"
    rows = [policy_row(study, policy, runs) for policy, runs in by_policy.items()]
    return f"{title}\n\n{markdown_table(HEADING, rows)}\n"


def policy_row(study: Study, policy: str, results: Sequence[StudyResult]) -> list[str]:
    values = [result.best_metric for result in results if result.best_metric is not None]
    worst = min if study.direction is Direction.MAX else max
    silent = len(results) - len(values)
    best = f"{np.mean(values):.4f}" if values else "none"
    return [
        policy,
        best + (f" ({silent} without)" if silent and values else ""),
        f"{worst(values):.4f}" if values else "none",
        f"{np.mean([result.trials_started for result in results]):.4g}",
        hours_text(float(np.mean([result.gpu_hours for result in results]))),
        format_usd(float(np.mean([result.cost_usd for result in results]))),
        format_duration(float(np.mean([result.finished_s for result in results]))),
        _endings(results),
    ]


def hours_text(hours: float) -> str:
    """With as many digits as tell one run from another, also of a short one."""
    return f"{hours:.1f}" if hours >= 1.0 else f"{hours:.3f}"


def _endings(results: Sequence[StudyResult]) -> str:
    """What ended the simulations; with numbers where they differ."""
    counts = Counter(result.ended_by for result in results)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
