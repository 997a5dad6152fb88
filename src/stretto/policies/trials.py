"""What policies that tune a study share: turning numbers of GPUs into a decision, and sharing GPUs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from stretto.allocate.placements import place_counts
from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import JobReported
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, explain, requested_batch
from stretto.search.study import Study

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


def share_with_unseen(
    tuning: Tuning, best_first: Sequence[str], unseen: int, gpus: int, how: Share
) -> dict[str, int]:
    """GPUs for each trial when `unseen` more are still to be drawn, which keep a share for when they come."""
    places = [f"unseen-{place}" for place in range(min(unseen, gpus - len(best_first)))]
    counts = share_out([*best_first, *places], gpus, most_useful_gpus(tuning, gpus), how)
    return {trial: counts[trial] for trial in best_first if trial in counts}


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
    view = view.including({**counts, **why, **stops})
    held = {job.id: job.allocation for job in view.jobs if job.allocation}
    allocations = place_counts(view.nodes, held, counts)
    reasons = explain(_changing(view, allocations, stops), allocations, why)
    reasons.update((trial, Reason(ReasonCode.STOPPED, text)) for trial, text in stops.items())
    return Decision(
        allocations=allocations,
        batches=_batches(view, allocations),
        reasons=reasons,
        stops=frozenset(stops),
        wake_at_s=wake_at_s,
    )


def is_diverged(job: JobView) -> bool:
    """Whether a trial's newest result is not a finite number."""
    if not job.results:
        return False
    value = job.results[-1].value
    return value is None or not math.isfinite(value)


def quiet_note(view: ClusterView, stops: Mapping[str, str], watch: Mapping[str, int]) -> dict[str, Any]:
    """What `is_quiet` must know later: who was there, and until which epoch each running trial goes alone."""
    jobs = None if len(watch) >= view.total_gpus else view.job_count - len(stops)
    return {"gpus": view.total_gpus, "jobs": jobs, "watch": dict(watch)}


def is_quiet(view: ClusterView, note: Mapping[str, Any]) -> bool:
    """Whether all is as noted: nobody came, left or diverged, and no trial is as far as was waited for.

    While every GPU has a trial of its own, it does not matter who comes.
    """
    if view.total_gpus != note["gpus"] or note["jobs"] not in {None, view.job_count}:
        return False
    watch, running = note["watch"], 0
    for job in view.jobs:
        if job.allocation:
            until = watch.get(job.job.id)
            if until is None or job.epoch >= until or is_diverged(job):
                return False
            running += 1
    return running == len(watch)


def metric_text(study: Study, score: float | None) -> str:
    """A score as the metric that people know."""
    if score is None:
        return f"{study.metric} not a number"
    return f"{study.metric} {study.value_of(score):.4g}"


def why_waits(job: JobView) -> str:
    """Why a trial waits, in words that stay the same while it does."""
    if job.epoch:
        return f"Paused after epoch {job.epoch} until its turn to go on."
    return "No slot is free for a new trial."


def as_before(view: ClusterView) -> Decision:
    """Everything stays as it is, and every trial waits for what it waited for."""
    allocations: dict[str, Allocation] = {}
    reasons: dict[str, Reason] = {}
    said: dict[int, Reason] = {}
    for job in view.jobs:
        if job.allocation:
            allocations[job.job.id] = job.allocation
            continue
        if job.epoch not in said:
            said[job.epoch] = Reason(ReasonCode.WAITS, why_waits(job))
        reasons[job.job.id] = said[job.epoch]
    return Decision(allocations=allocations, reasons=reasons)


def beside_others(
    view: ClusterView, study: Study, decide: Callable[[ClusterView], tuple[Decision, Memory]]
) -> tuple[Decision, Memory]:
    """Decide about the trials of a study alone; jobs that are none keep what they hold, or wait."""
    others = [job for job in view.jobs if job.job.study != study.name]
    if not others:
        return decide(view)
    held = {job.id: job.allocation for job in others if job.allocation}
    decision, memory = decide(_left_by(view, others))
    waits = Reason(ReasonCode.WAITS, f"It is not a trial of the study {study.name}.")
    reasons = {job.id: waits for job in others if not job.allocation}
    return replace(
        decision, allocations={**decision.allocations, **held}, reasons={**decision.reasons, **reasons}
    ), memory


def _left_by(view: ClusterView, others: Sequence[JobView]) -> ClusterView:
    free = {node.id: node.capacity for node in view.nodes}
    for job in others:
        for node, used in job.allocation.uses(job.job).items():
            if node in free:  # else it drains
                free[node] -= used
    gone = {job.id for job in others}
    return replace(
        view,
        nodes=tuple(replace(node, capacity=free[node.id]) for node in view.nodes),
        jobs=tuple(job for job in view.jobs if job.id not in gone),
    )


def within(gpus: int, held: Mapping[str, int]) -> dict[str, int]:
    """Of what trials hold, the first that fit in so many GPUs; the others lost their place."""
    kept: dict[str, int] = {}
    for trial, count in held.items():
        if count <= gpus:
            kept[trial] = count
            gpus -= count
    return kept


def _changing(
    view: ClusterView, allocations: Mapping[str, Allocation], stops: Mapping[str, str]
) -> ClusterView:
    """Without the trials that are stopped or stay just where they are: most of them, at most times."""
    jobs = tuple(
        job
        for job in view.jobs
        if allocations.get(job.job.id) is not job.allocation and job.job.id not in stops
    )
    return ClusterView(now_s=view.now_s, nodes=view.nodes, jobs=jobs)


def _batches(view: ClusterView, allocations: Mapping[str, Allocation]) -> dict[str, BatchChoice]:
    """Running trials whose size stays keep their batch."""
    batches = {}
    for job in view.jobs:
        new = allocations.get(job.job.id)
        if new:
            same = new is job.allocation or new.worker_count == job.allocation.worker_count
            batches[job.job.id] = (
                job.batch if same and job.batch is not None else requested_batch(job.job, new.worker_count)
            )
    return batches
