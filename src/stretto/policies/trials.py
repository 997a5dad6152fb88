"""What policies that tune a study have in common: a base class, sharing of GPUs, decisions by GPU counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np

from stretto.allocate.placements import place_counts
from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import JobReported
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, explain, requested_batch
from stretto.search.study import Study

Share = Literal["none", "uniform", "top"]
"""Who gets spare GPUs: no trial, all trials in turn, or the best trial."""

TUNING_EVENTS: Final = BASELINE_EVENTS | {JobReported.kind}
"""Events that change the jobs or the nodes, and every result."""


@dataclass(frozen=True, kw_only=True)
class TrialPolicy(ABC):
    """A policy that tunes one study: what sha, asha, hyperband and random search have in common."""

    name: ClassVar[str]
    wakes_on: ClassVar[frozenset[str]] = TUNING_EVENTS
    looks_up_paused: ClassVar[bool] = True
    tuning: Tuning
    interval_s: float = 60.0
    share: Share = "none"
    """Who gets GPUs that no other trial can use."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng

        def decide(trials: ClusterView) -> tuple[Decision, Memory]:
            if not trials.total_gpus or (memory is not None and is_quiet(trials, memory["quiet"])):
                return as_before(trials), memory
            return self.decide_trials(trials, memory)

        return beside_others(view, self.tuning.study, decide)

    @abstractmethod
    def decide_trials(self, trials: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        """Decide about the study's trials; called when there are GPUs and something has changed."""


def share_out(best_first: Sequence[str], gpus: int, most: int, how: Share) -> dict[str, int]:
    """GPUs for each trial: one each, the best first, and the rest by `how`, at most `most` each."""
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
    """The most GPUs, up to `gpus`, that make a trial faster."""
    return max(1, min(tuning.profile.scaling.most_gpus, gpus))


def share_with_unseen(
    tuning: Tuning, best_first: Sequence[str], unseen: int, gpus: int, how: Share
) -> dict[str, int]:
    """GPUs for each trial, with a share kept free for `unseen` trials that are still to be drawn."""
    places = [f"unseen-{place}" for place in range(min(unseen, gpus - len(best_first)))]
    counts = share_out([*best_first, *places], gpus, most_useful_gpus(tuning, gpus), how)
    return {trial: counts[trial] for trial in best_first if trial in counts}


def decide_counts(
    view: ClusterView,
    counts: Mapping[str, int],
    why: Mapping[str, str],
    *,
    stops: Mapping[str, str] | None = None,
) -> Decision:
    """A decision that gives trials these GPUs, pauses the others and stops those in `stops`.

    `why` has the reason of every trial that changes or waits, `stops` the reason of every stopped one.
    """
    stops = stops or {}
    view = view.including({**counts, **why, **stops})
    held = {job.id: job.allocation for job in view.jobs if job.allocation}
    allocations = place_counts(view.nodes, held, counts)
    reasons = explain(_changing(view, allocations, stops), allocations, why)
    reasons.update((trial, Reason(ReasonCode.STOPPED, text)) for trial, text in stops.items())
    return Decision(
        allocations=allocations, batches=_batches(view, allocations), reasons=reasons, stops=frozenset(stops)
    )


def is_diverged(job: JobView) -> bool:
    """Whether a trial's newest result is not a finite number."""
    if not job.results:
        return False
    value = job.results[-1].value
    return value is None or not math.isfinite(value)


def quiet_note(view: ClusterView, stops: Mapping[str, str], watch: Mapping[str, int]) -> dict[str, Any]:
    """What `is_quiet` needs: the GPUs and jobs, and the epoch until which each trial needs no decision."""
    jobs = None if len(watch) >= view.total_gpus else view.job_count - len(stops)
    return {"gpus": view.total_gpus, "jobs": jobs, "watch": dict(watch)}


def is_quiet(view: ClusterView, note: Mapping[str, Any]) -> bool:
    """Whether nothing has changed since the note: no trial came, left, diverged or reached its epoch.

    While every GPU has a trial, new trials do not matter.
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
    """A score as a value of the study's metric."""
    if score is None:
        return f"{study.metric} not a number"
    return f"{study.metric} {study.value_of(score):.4g}"


def why_waits(job: JobView) -> str:
    """Why a trial waits, in words that stay the same while it does."""
    if job.epoch:
        return f"Paused after epoch {job.epoch} until it is its turn to continue."
    return "No slot is free for a new trial."


def as_before(view: ClusterView) -> Decision:
    """A decision that leaves everything as it is."""
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
    """Decide about the trials of the study only; other jobs keep what they hold, or wait."""
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
    """The first trials that fit in this many GPUs, with what they hold."""
    kept: dict[str, int] = {}
    for trial, count in held.items():
        if count <= gpus:
            kept[trial] = count
            gpus -= count
    return kept


def _changing(
    view: ClusterView, allocations: Mapping[str, Allocation], stops: Mapping[str, str]
) -> ClusterView:
    """The view without trials that are stopped or unchanged, which are most of them."""
    jobs = tuple(
        job
        for job in view.jobs
        if allocations.get(job.job.id) is not job.allocation and job.job.id not in stops
    )
    return ClusterView(now_s=view.now_s, nodes=view.nodes, jobs=jobs)


def _batches(view: ClusterView, allocations: Mapping[str, Allocation]) -> dict[str, BatchChoice]:
    """Batch sizes of all running trials; a trial of unchanged size keeps its batch."""
    batches = {}
    for job in view.jobs:
        new = allocations.get(job.job.id)
        if new:
            same = new is job.allocation or new.worker_count == job.allocation.worker_count
            batches[job.job.id] = (
                job.batch if same and job.batch is not None else requested_batch(job.job, new.worker_count)
            )
    return batches
