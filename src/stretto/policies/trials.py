"""What policies that tune a study share: turning numbers of GPUs into a decision, and sharing GPUs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from stretto.allocate.counts import place_counts
from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import JobReported
from stretto.core.observations import Result
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView
from stretto.policies.common import BASELINE_EVENTS, explain, requested_batch

Share = Literal["none", "uniform", "top"]
"""Who gets GPUs that are left over: nobody, everybody in turn, or the best trial."""

TUNING_EVENTS: Final = BASELINE_EVENTS | {JobReported.kind}
"""Besides what changes jobs and room, every result."""


def share_out(best_first: Sequence[str], gpus: int, most: int, how: Share) -> dict[str, int]:
    """GPUs for each trial: one each, the best first, and the rest as `how` says, at most `most` each."""
    counts = dict.fromkeys(best_first[:gpus], 1)
    left = gpus - len(counts)
    if how == "none" or not counts:
        return counts
    if how == "top":
        for trial in counts:
            extra = min(left, most - 1)
            counts[trial] += extra
            left -= extra
        return counts
    while left and any(count < most for count in counts.values()):
        for trial, count in counts.items():
            if left and count < most:
                counts[trial] += 1
                left -= 1
    return counts


def most_useful_gpus(tuning: Tuning, gpus: int) -> int:
    """More GPUs than this do not make a trial faster, or are not there."""
    return max(1, min(tuning.profile.scaling.most_gpus, gpus))


def decide_counts(
    view: ClusterView,
    counts: Mapping[str, int],
    why: Mapping[str, str],
    *,
    stops: Mapping[str, str] | None = None,
    wake_at_s: float | None = None,
) -> Decision:
    """A decision that gives each trial so many GPUs, pauses the others and stops those in `stops`.

    `why` has the sentence of every trial that changes or waits, `stops` that of every one that is stopped.
    """
    stops = stops or {}
    held = {job.id: job.allocation for job in view.jobs if job.allocation}
    allocations = place_counts(view.nodes, held, counts)
    reasons = explain(_without(view, stops), allocations, why)
    reasons.update((trial, Reason(ReasonCode.STOPPED, text)) for trial, text in stops.items())
    return Decision(
        allocations=allocations,
        batches=_batches(view, allocations),
        reasons=reasons,
        stops=frozenset(stops),
        wake_at_s=wake_at_s,
    )


def unchanged(view: ClusterView, waits: str, *, wake_at_s: float | None = None) -> Decision:
    """Everything stays as it is; `waits` is why the waiting wait."""
    return Decision(
        allocations={job.id: job.allocation for job in view.jobs if job.allocation},
        reasons={job.id: Reason(ReasonCode.WAITS, waits) for job in view.jobs if not job.allocation},
        wake_at_s=wake_at_s,
    )


def latest(job: JobView) -> Result | None:
    """A trial's newest result."""
    return job.results[-1] if job.results else None


def _without(view: ClusterView, stops: Mapping[str, str]) -> ClusterView:
    if not stops:
        return view
    return ClusterView(
        now_s=view.now_s, nodes=view.nodes, jobs=tuple(job for job in view.jobs if job.id not in stops)
    )


def _batches(view: ClusterView, allocations: Mapping[str, Allocation]) -> dict[str, BatchChoice]:
    """Running trials whose size stays keep their batch."""
    batches = {}
    for job in view.jobs:
        new = allocations.get(job.id)
        if new:
            batches[job.id] = (
                job.batch
                if job.batch is not None and new.worker_count == job.allocation.worker_count
                else requested_batch(job.job, new.worker_count)
            )
    return batches
