"""Failures in words: what several jobs have in common is said once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stretto.core.units import format_duration
from stretto.report.names import one_line

MOST_SHOWN = 3
"""Different failures that are told in full."""
MOST_NAMED = 5
"""Jobs that are named as having failed alike."""
LOG = "log: "
"""Begins the last line of an error: every job has a log of its own."""


def with_failed(ending: str, failed: int) -> str:
    """How a run ended, before a word on when: also how many of its jobs failed."""
    return f"{ending}, {failed} failed," if failed else ending


def as_far_as_known(ending: str, until_s: float) -> str:
    """How a run ended whose journal is damaged, without a word on when."""
    return (
        f"{ending.rstrip(',')}; its journal is damaged, and what follows is known only until "
        f"{format_duration(until_s)}."
    )


def failure_lines(errors: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Of each job that failed its id and its error: each error in full once, with those that share it."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for job_id, error in errors:
        alike.setdefault(_without_log(error), []).append((job_id, error))
    groups = list(alike.values())
    for (first, error), *others in groups[:MOST_SHOWN]:
        yield ""
        yield f"{one_line(first)} failed: {error.strip()}"
        if others:
            yield f"The same in {_named([job_id for job_id, _ in others])}."
    if rest := [job_id for group in groups[MOST_SHOWN:] for job_id, _ in group]:
        yield ""
        yield f"Others failed otherwise: {_named(rest)}."


def _without_log(error: str) -> str:
    return "\n".join(line for line in error.strip().splitlines() if not line.startswith(LOG))


def _named(jobs: list[str]) -> str:
    shown = ", ".join(one_line(job) for job in jobs[:MOST_NAMED])
    return shown if len(jobs) <= MOST_NAMED else f"{shown} and {len(jobs) - MOST_NAMED} more"
