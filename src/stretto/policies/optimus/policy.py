"""Optimus: the job with the largest marginal gain gets the next worker or parameter server.

The rule: each job has a remaining time T(w, p) = Q / f(w, p) with w workers and p servers.

- Q is the work left: from the owner's number of epochs, or by convergence of the loss curve
  (models/convergence.py).
- f is the speed (models/parameter_server.py; for all-reduce jobs models/speed.py at the requested batch).

The cluster is shared out by the time saved per dominant share (allocate/marginal.py). Placement follows the
theorem: the fewest nodes, with workers and servers spread evenly (allocate/even_spread.py).

New jobs: a parameter-server job of unknown speed runs with a few different counts for a short time each
(samples.py). These sample runs come before any job grows. They are skipped if the speed is known from earlier
jobs of the application. An all-reduce job needs no samples: its speed model is optimistic about untried
counts, and it may grow to twice the workers it was seen with.

Everything is shared out again once per interval. In between, new jobs start and sample runs continue on free
capacity, and all other jobs stay as they are.

Restart penalty: T is longer by the expected restart for all counts but those the job runs with now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal

import msgspec
import numpy as np

from stretto.allocate.even_spread import JobToPlace, Placer, place_all, spread_or_pack
from stretto.allocate.free import FreeCapacity, place_packed
from stretto.allocate.marginal import NONE, Claim, RemainingTime, share_out
from stretto.core.allocation import Allocation
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.job import Job, Role, Tier
from stretto.core.resources import Resources
from stretto.core.units import format_duration
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, EPS, check_option, fixed_size_decision, round_is_due
from stretto.policies.gangs import (
    EmptyCluster,
    GangSize,
    crowded_out,
    held_gang,
    keep_running,
    largest_gang,
    never_fits,
    smallest_gang,
)
from stretto.policies.optimus.outlook import (
    RemainingWork,
    fewest_nodes,
    modelled_speed,
    remaining_s_all_reduce,
    remaining_s_with_servers,
    remaining_work,
    uses_servers,
)
from stretto.policies.optimus.samples import OptimusMemory, still_to_sample

EXPLORE = 2
"""An all-reduce job may grow to this many times the most workers it was seen with."""

PLACERS: Mapping[str, Placer] = {"theorem": spread_or_pack, "packed": place_packed}


@dataclass(frozen=True, kw_only=True)
class Optimus:
    """Shares out workers and servers by marginal gain, with models fitted while jobs run."""

    name: ClassVar[str] = "optimus"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0
    """Time between rounds; 600 in the paper."""
    samples: int = 3
    """How many different counts a new parameter-server job is run with before its speed is modelled.

    Five identify the model (four if asynchronous), but the last two cost more than they are worth.
    """
    sample_s: float = 30.0
    """How long each sample run trains."""
    young_factor: float = 0.95
    """Weight of the gain of young jobs, whose convergence is hard to predict; 1 treats all jobs alike."""
    young_epochs: int = 10
    """A job that ends at convergence is young until it has completed this many epochs."""
    assumed_epochs: int = 20
    """Epochs that such a job is assumed to have left while nothing can be fitted."""
    resize_weight: float = 1.0
    """A change must save a job this many times its restart penalty; 0 ignores restarts."""
    placement: Literal["theorem", "packed"] = "theorem"
    """Spread workers and servers evenly over the fewest nodes, or fill nodes one by one."""

    def __post_init__(self) -> None:
        names = ", ".join(PLACERS)
        check_option(self.name, "placement", self.placement, self.placement in PLACERS, f"one of {names}")
        for option, allowed, rule in (
            ("samples", self.samples >= 0, "0 or more"),
            ("sample_s", self.sample_s > 0, "more than 0 seconds"),
            ("young_factor", 0 < self.young_factor <= 1, "a number above 0, at most 1"),
            ("young_epochs", self.young_epochs >= 0, "0 or more"),
            ("assumed_epochs", self.assumed_epochs >= 1, "1 or more"),
            ("resize_weight", self.resize_weight >= 0, "0 or more"),
        ):
            check_option(self.name, option, getattr(self, option), allowed, rule)

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        before = OptimusMemory() if memory is None else msgspec.convert(memory, OptimusMemory)
        turn = _Turn(self, view, before)
        turn.share_out()
        decision = fixed_size_decision(view, turn.allocations, turn.why)
        reasons = {**decision.reasons, **turn.why_not_larger()}
        wake_at_s = min(turn.sampling.values(), default=None)
        return replace(decision, reasons=reasons, wake_at_s=wake_at_s), msgspec.to_builtins(turn.memory())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one job may get, and what is known about it."""

    job: JobView
    claim: Claim
    to_sample: tuple[GangSize, ...] = ()
    """Counts that it has yet to be run with."""
    work: RemainingWork | None = None
    """None while its speed is unknown."""
    warning: str = ""


class _Turn:
    """One decision: plans for all jobs, the counts granted and their placement."""

    def __init__(self, options: Optimus, view: ClusterView, before: OptimusMemory) -> None:
        self._options = options
        self._view = view
        self._before = before
        self._is_round = round_is_due(before.round_s, view.now_s, options.interval_s)
        self._empty = EmptyCluster(view.nodes)
        self._free = FreeCapacity(view.nodes)
        self._nodes_for: dict[Role, list[int]] = {}
        self._plans: dict[str, _Plan] = {}
        self._models: dict[str, list[float]] = {}
        self.allocations: dict[str, Allocation] = {}
        self.sampling: dict[str, float] = {}
        """Jobs in a sample run, and when it ends."""

    def share_out(self) -> None:
        fixed = keep_running([job for job in self._view.jobs if self._stays(job)], self._free)
        self._models = {job_id: self._before.models[job_id] for job_id in self._before.models.keys() & fixed}
        self._plans = {job.id: self._plan(job) for job in self._view.jobs if job.id not in fixed}
        plans = list(self._plans.values())
        counts = share_out([plan.claim for plan in plans], self._free.total(), self._view.capacity)
        seats = [
            JobToPlace(job=plan.job.job, wanted=wanted, least=plan.claim.least, held=plan.job.allocation)
            for plan, wanted in zip(plans, counts, strict=True)
            if wanted != NONE
        ]
        self.allocations = fixed | place_all(seats, self._free, PLACERS[self._options.placement])
        self.sampling = {plan.job.id: end_s for plan in plans if (end_s := self._sample_end_s(plan))}

    def memory(self) -> OptimusMemory:
        return OptimusMemory(
            round_s=self._view.now_s if self._is_round else self._before.round_s,
            sampling=self.sampling,
            models=self._models,
        )

    def why(self, job: JobView, code: ReasonCode) -> str:
        plan = self._plans[job.id]
        if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
            least = GangSize(*plan.claim.least)
            return never_fits(job, least, self._empty) or crowded_out(least)
        gang = held_gang(self.allocations[job.id])
        if job.job.tier is Tier.RIGID:
            return f"Gets the {gang} it asked for, in order of submission."
        if job.id in self.sampling:
            return f"Sample run with {gang}, to learn its speed; {len(plan.to_sample)} more could follow."
        if plan.work is None:
            missing = "there is room for a sample run" if plan.to_sample else "its speed is known"
            return f"Its smallest size, {gang}, until {missing}."
        return f"{_gains(plan, gang)}{plan.warning}"

    def why_not_larger(self) -> dict[str, Reason]:
        """Reasons of jobs that keep their size in this round although there is room for another worker."""
        reasons = {}
        has_room = cache(self._has_room)
        for plan in self._plans.values():
            job, held = plan.job, held_gang(plan.job.allocation)
            stays = bool(job.allocation) and self.allocations.get(job.id) == job.allocation
            grows = plan.work is not None and held.workers < plan.claim.most[0]
            if stays and grows and has_room(plan.claim.worker):
                text = f"Stays with {held}: another worker would save it less time than a resize takes."
                reasons[job.id] = Reason(ReasonCode.KEPT, text)
        return reasons

    def _has_room(self, demand: Resources) -> bool:
        return any(self._free.fits(node, demand) for node in self._free.ids)

    def _stays(self, job: JobView) -> bool:
        """Whether a running job keeps what it has without being considered in this decision."""
        between_rounds = not self._is_round and job.id not in self._before.sampling
        return bool(job.allocation) and (between_rounds or not job.job.preemptible)

    def _plan(self, job: JobView) -> _Plan:
        if job.job.tier is Tier.RIGID:
            return _Plan(job=job, claim=_claim(job))
        return self._plan_with_servers(job) if uses_servers(job.job) else self._plan_all_reduce(job)

    def _plan_with_servers(self, job: JobView) -> _Plan:
        known = self._before.models.get(job.id)
        fit = modelled_speed(job.belief.server_speed, known)
        to_sample = still_to_sample(job.job, fit, self._options.samples) if known is None else ()
        if to_sample:
            targets = (held_gang(job.allocation),) if self._in_sample_run(job, to_sample) else to_sample
            return _Plan(job=job, claim=replace(_claim(job), targets=targets), to_sample=to_sample)
        if fit is None:
            return _Plan(job=job, claim=_claim(job))
        self._models[job.id] = list(fit.model.thetas) if fit.identified else []
        work = remaining_work(job, self._options.assumed_epochs)
        claim = self._growing(job, work, _most(job.job), remaining_s_with_servers(job, work.units, fit))
        return _Plan(job=job, claim=claim, work=work, warning=f" {fit.warning}" if fit.warning else "")

    def _plan_all_reduce(self, job: JobView) -> _Plan:
        speed = job.belief.speed
        if speed is None:
            return _Plan(job=job, claim=_claim(job))
        role = job.job.worker
        nodes_for = self._nodes_for.get(role)
        if nodes_for is None:
            nodes_for = self._nodes_for[role] = fewest_nodes(job.job, self._empty.free)
        least = smallest_gang(job.job).workers
        if least >= len(nodes_for):
            return _Plan(job=job, claim=_claim(job))
        seen = max(job.belief.max_workers_seen, least)
        workers, servers = _most(job.job)
        most = GangSize(min(workers, EXPLORE * seen, len(nodes_for) - 1), servers)
        work = remaining_work(job, self._options.assumed_epochs)
        remaining_s = remaining_s_all_reduce(job, work.units, speed, nodes_for)
        return _Plan(job=job, claim=self._growing(job, work, most, remaining_s), work=work)

    def _growing(
        self, job: JobView, work: RemainingWork, most: GangSize, remaining_s: RemainingTime
    ) -> Claim:
        young = work.estimated and job.epoch < self._options.young_epochs
        return replace(
            _claim(job),
            most=most,
            remaining_s=remaining_s,
            factor=self._options.young_factor if young else 1.0,
            held=held_gang(job.allocation),
            resize_s=self._options.resize_weight * job.belief.resize.expected_s,
        )

    def _in_sample_run(self, job: JobView, to_sample: tuple[GangSize, ...]) -> bool:
        """Whether the job is in a sample run that is not over."""
        ends_s = self._before.sampling.get(job.id, 0.0)
        return bool(job.allocation) and (
            held_gang(job.allocation) in to_sample or self._view.now_s < ends_s - EPS
        )

    def _sample_end_s(self, plan: _Plan) -> float | None:
        """When the job's sample run ends; None if it is in none."""
        job, new = plan.job, self.allocations.get(plan.job.id)
        if new is None or held_gang(new) not in {*plan.to_sample, *plan.claim.targets}:
            return None
        now_s, sample_s = self._view.now_s, self._options.sample_s
        if new != job.allocation:
            return now_s + job.belief.resize.expected_s + sample_s
        ends_s = self._before.sampling.get(job.id, 0.0)
        return ends_s if ends_s > now_s + EPS else now_s + sample_s


def _claim(job: JobView) -> Claim:
    """A claim to the smallest gang and no more."""
    least = smallest_gang(job.job)
    server = job.job.server.demand if job.job.server else Resources()
    return Claim(worker=job.job.worker.demand, server=server, least=least, most=least)


def _most(job: Job) -> GangSize:
    """The most a job can use: the requested batch must give every worker its smallest batch."""
    least, most = smallest_gang(job), largest_gang(job)
    workers = min(most.workers, job.batch.requested // max(job.batch.per_gpu_min, 1))
    return GangSize(max(workers, least.workers), most.servers)


def _gains(plan: _Plan, gang: GangSize) -> str:
    """The reason of a job that was granted counts by marginal gain."""
    claim = plan.claim
    left_s = claim.remaining_s(*gang)

    def saved(more: GangSize) -> str:
        then = GangSize(gang.workers + more.workers, gang.servers + more.servers)
        if then.workers > claim.most[0] or then.servers > claim.most[1]:
            return "is more than it can take"
        return f"would save {left_s - claim.remaining_s(*then):.0f} s"

    steps = [f"one more worker {saved(GangSize(1, 0))}"]
    if gang.servers:
        steps.append(f"one more server {saved(GangSize(0, 1))}")
    work = plan.work.text if plan.work else ""
    return f"{work}: {format_duration(left_s)} with {gang}; {', '.join(steps)}."
