"""Whether commands that were disturbed came to what undisturbed ones come to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from fault_command import value_after
from fault_commands import EPOCHS, JOBS, Ending, JobSeen, Kind, Outcome

BESIDE_S = 0.1
"""Two processes of a job are seen at the same time if they overlap by more; a beat takes less to write."""
REFUSED = frozenset({1, 2})
"""Exit codes of those that say in words what they cannot do."""


def problems_of(outcome: Outcome) -> Iterator[str]:
    """Everything that is not as it should be."""
    yield from (f"unasked: {one}" for one in outcome.unasked)
    if outcome.left:
        yield f"processes are left behind: {outcome.left}"
    if "Traceback" in _without_users(outcome.ending.said):
        yield f"a traceback is shown: {outcome.ending.said[-1000:]}"
    for ending in outcome.second_starts:
        yield from (f"second start: {one}" for one in _not_refused(ending))
    if Kind.FOLDER in outcome.faults:
        yield from (f"deleted folder: {one}" for one in _not_refused(outcome.ending))
        return
    if outcome.ending.code != 0:
        yield f"it ended with {outcome.ending.code}: {outcome.ending.said[-500:]}"
    if len(outcome.jobs) != JOBS:
        yield f"{len(outcome.jobs)} jobs instead of {JOBS}"
    for job in outcome.jobs:
        for problem in _problems_of_job(job, lost=Kind.JOURNAL_BYTES in outcome.faults):
            yield f"{job.id}: {problem}"


def _not_refused(ending: Ending) -> Iterator[str]:
    if ending.code is None:
        yield "it did not end"
    elif ending.code not in REFUSED or "error: " not in ending.said:
        yield f"it was not refused in words, {ending.code}: {ending.said[-500:]}"
    if "Traceback" in _without_users(ending.said):
        yield f"a traceback is shown: {ending.said[-1000:]}"


def _without_users(said: str) -> str:
    """Tracebacks of a command that raised are a user's own, and shown on purpose."""
    return "" if "a trap that was laid" in said else said


def _problems_of_job(job: JobSeen, *, lost: bool) -> Iterator[str]:
    """Where the journal was damaged, epochs that it had are `lost`, and others are told once."""
    if job.state != "finished":
        yield f"it is {job.state}"
    epochs = [epoch for epoch, _ in job.told]
    if epochs != sorted(set(epochs)) or (not lost and epochs != list(range(1, EPOCHS + 1))):
        yield f"its epochs were told as {epochs}"
    for epoch, value in job.told:
        if value is None or not math.isclose(value, value_after(epoch, job.seed), rel_tol=1e-12):
            yield f"{value} was told of epoch {epoch}, which came to {value_after(epoch, job.seed)}"
    for before, after in pairwise(sorted(job.spans, key=lambda span: span.first_s)):
        if before.last_s > after.first_s + BESIDE_S:
            yield f"process {before.pid} still trained when {after.pid} did"
