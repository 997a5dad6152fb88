"""One decision of RubberBand: reads what happened since the last one, and carries the plan on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.cluster import Wish
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import NodeRefused
from stretto.core.units import HOUR_S, counted, format_duration
from stretto.planning.forecast import HeldNode, StudyProgress
from stretto.planning.plan import StagePlan
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView
from stretto.policies.common import explain, requested_batch
from stretto.policies.rubberband.drift import epoch_s, finish_s, slowness_by_trial, steady_s
from stretto.policies.rubberband.memory import PlanBasis, PlanState, cut_to, own_nodes, usable
from stretto.policies.trials import is_diverged, metric_text
from stretto.pricing.billing import Per

CHECKS = 8
"""How often per stage the deadline is checked."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pauses between requests when all nodes are refused, again and again."""


Replan = Callable[[StudyProgress, float], tuple[list[StagePlan], PlanBasis]]
"""Plans the rest of a study, given how much longer epochs take than in the profile."""


@dataclass(slots=True)
class RubberBandTurn:
    """One decision about the trials and nodes of a study."""

    tuning: Tuning
    state: PlanState
    view: ClusterView
    replan: Replan
    tolerance: float
    """Relative error of the finish time that causes a new plan; 0: never plan again."""
    stops: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, JobView] = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = {job.id: job for job in self.view.jobs}

    def decide(self) -> Decision:
        """Update the state with what is new, then carry the plan on."""
        state = self.state
        note_nodes(self.tuning, state, self.view)
        if self._here():
            state.again_s, state.in_vain = None, 0
        elif state.again_s is not None and self.view.now_s >= state.again_s:
            state.again_s = None
        if not state.slots and state.again_s is None:
            self._assign_slots()
        self._read_nodes()
        self._read_refusals()
        self._read_results()
        self._admit()
        while state.living and len(state.done) == len(state.living) and not state.is_last:
            self._advance()
        self._watch_deadline()
        state.start_pending()
        self._use_fewer_nodes()
        all_started = not state.pending and (state.stage > 0 or state.entered == state.quota)
        if all_started and (state.is_last or not state.living):
            state.give_up_idle()
        return self._decision()

    def _here(self) -> list[str]:
        plan = self.state.plan
        return usable(self.view.nodes, plan.instance, self.tuning.instance(plan.instance).gpus)

    def _assign_slots(self) -> None:
        """Make slots for the stage as planned, or fewer if fewer trials are left."""
        state, plan = self.state, self.state.plan
        size = self.tuning.instance(plan.instance).gpus
        left = len(state.living) - len(state.done) if state.entered == state.quota else plan.trials
        at_once, nodes = cut_to(plan, left, size)
        state.assign_slots(self._here(), nodes, plan.gpus_per_trial, size, at_once)
        state.asked_s = self.view.now_s
        watched = self.tolerance > 0 and self.tuning.limits.deadline_s is not None
        state.check_s = self.view.now_s + self._check_after_s() if watched else None

    def _check_after_s(self) -> float:
        plan = self.state.plan
        work_s = plan.waves * plan.epochs * epoch_s(self.tuning, plan, self.state.footing.slowness)
        return max(work_s / CHECKS, 1.0)

    def _read_nodes(self) -> None:
        """Update the state for nodes that came or went, and for trials that ended or lost their nodes."""
        state = self.state
        if state.match_nodes(self._here()):
            state.asked_s = self.view.now_s
        for trial in [trial for trial in state.living if trial not in self.jobs]:
            state.leave(trial)
        state.runs = {trial: slot for trial, slot in state.runs.items() if self.jobs[trial].allocation}

    def _read_refusals(self) -> None:
        """Stop waiting for nodes that were refused; they may be requested again in the next stage."""
        state = self.state
        fresh = [
            refusal
            for refusal in self.view.refused[state.refusals :]
            if refusal.instance == state.plan.instance
        ]
        state.refusals = len(self.view.refused)
        planned = len(state.kept)
        refused = min(sum(refusal.count for refusal in fresh), state.to_come)
        if not refused:
            return
        dropped, text = state.expect_less(refused), refusal_text(fresh, refused, planned)
        if not state.kept:
            state.in_vain += 1
            at_s = again_at_s(fresh[-1].t_s, self.view.now_s, state.in_vain, self.tuning.limits.deadline_s)
            state.stand_by(at_s, text)
        elif state.give_up_slots(dropped) and self._left():
            self._continue_on(len(state.kept), f"{text}; the stage continues on {len(state.kept)}.")

    def _left(self) -> int:
        """Trials that run in this stage, now or later."""
        state = self.state
        to_enter = state.quota - state.entered if state.stage == 0 else 0
        return len(state.living) - len(state.done) + to_enter

    def _continue_on(self, nodes: int, why: str) -> None:
        """Do the rest of the stage on `nodes` nodes; some of them may still be to come."""
        state, left = self.state, self._left()
        stage = on_fewer(self.tuning, state.plan, left, nodes, state.footing.slowness)
        state.cut_down(stage)
        held = {trial: self.jobs[trial].allocation for trial in state.living if trial not in state.done}
        state.was.update(
            (trial, dict(allocation.workers)) for trial, allocation in held.items() if allocation
        )
        here = [node for node in self._here() if node in state.kept]
        size = self.tuning.instance(stage.instance).gpus
        state.assign_slots(here, nodes, stage.gpus_per_trial, size, stage.at_once)
        state.short = why

    def _read_results(self) -> None:
        """Stop trials that diverged, and note which trials reached the end of the stage."""
        state, plan = self.state, self.state.plan
        for trial in [trial for trial in state.living if trial not in state.done]:
            job = self.jobs[trial]
            if not job.results:
                continue
            last = job.results[-1]
            if is_diverged(job):
                self._stop(
                    trial, f"Its {self.tuning.study.metric} is not a finite number at epoch {last.epoch}."
                )
            elif last.epoch >= plan.last_epoch and not state.is_last:
                at_end = next(r for r in reversed(job.results) if r.epoch <= plan.last_epoch)
                state.done[trial] = self.tuning.study.score(at_end.value)
                state.was[trial] = dict(job.allocation.workers)
                state.runs.pop(trial, None)

    def _stop(self, trial: str, why: str) -> None:
        note_work(self.tuning, self.state, [self.jobs[trial]])
        self.stops[trial] = why
        self.state.leave(trial)

    def _admit(self) -> None:
        """Admission: the first stage takes as many trials as planned; any others are stopped."""
        state = self.state
        for trial in self.jobs:
            if trial in state.living or trial in self.stops:
                continue
            if state.stage == 0 and state.entered < state.quota:
                state.entered += 1
                state.living.append(trial)
            else:
                self.stops[trial] = f"The plan has {state.quota} trials, which have all begun."

    def _advance(self) -> None:
        """End the stage: promote the best trials, stop the others and lay out the next stage."""
        state, plan = self.state, self.state.plan
        ranked = sorted(state.done, key=lambda trial: (-state.done[trial], trial))
        speeds = slowness_by_trial(self.tuning, state, self.jobs)
        note_work(self.tuning, state, [self.jobs[trial] for trial in ranked])
        best = ranked[: state.stages[state.stage + 1].trials]
        for rank, trial in enumerate(ranked[len(best) :], start=len(best) + 1):
            shown = metric_text(self.tuning.study, state.done[trial])
            self._stop(
                trial,
                f"Rank {rank} of {len(ranked)} at epoch {plan.last_epoch}, with {shown}; "
                f"the best {len(best)} continue.",
            )
        if self._drifted({trial: speeds[trial] for trial in best if trial in speeds}):
            start = self._progress(state.stage + 1, best, 0, speeds)
            state.adopt(state.stage + 1, *self.replan(start, fmean(speeds.values())))
        state.stage, state.whole = state.stage + 1, None
        state.living, state.done = best, {}
        self._assign_slots()

    def _drifted(self, speeds: Mapping[str, float]) -> bool:
        """Whether the later stages will end too late, or at another time than forecast."""
        if not self.tolerance or not speeds:
            return False
        state, footing = self.state, self.state.footing
        held = (state.plan.instance, len(state.kept))
        later_s = steady_s(self.tuning, state.stages[state.stage + 1 :], held, fmean(speeds.values()))
        end_s = self.view.now_s + later_s * footing.stretch
        deadline_s = self.tuning.limits.deadline_s
        off = abs(end_s - footing.finish_s) > self.tolerance * (footing.finish_s - footing.made_s)
        return off or (deadline_s is not None and end_s > deadline_s)

    def _watch_deadline(self) -> None:
        """Plan again within a stage, at most once, if the plan would miss the deadline."""
        state, now_s, deadline_s = self.state, self.view.now_s, self.tuning.limits.deadline_s
        if state.check_s is None or now_s < state.check_s or deadline_s is None or not state.living:
            return
        state.check_s = now_s + self._check_after_s()
        speeds = slowness_by_trial(self.tuning, state, self.jobs)
        if not speeds:
            return
        slowness = fmean(speeds.values())
        if finish_s(self.tuning, state, now_s, self.jobs, slowness) > deadline_s:
            self._replan_now(speeds, slowness)

    def _replan_now(self, speeds: Mapping[str, float], slowness: float) -> None:
        state, old = self.state, self.state.plan
        alive = [self.jobs[trial] for trial in state.living]
        note_work(self.tuning, state, alive)
        behind = fmean(min(job.epoch, old.last_epoch) for job in alive) - old.first_epoch + 1
        start = self._progress(state.stage, state.living, max(int(behind), 0), speeds)
        stages, footing = self.replan(start, slowness)
        stages[0] = replace(stages[0], first_epoch=old.first_epoch)
        state.adopt(state.stage, stages, footing)
        if _holding(state.plan) != _holding(old):
            state.was.update((job.id, dict(job.allocation.workers)) for job in alive if job.allocation)
            self._assign_slots()
        state.check_s = None

    def _progress(
        self, stage: int, trials: Sequence[str], epochs_done: int, speeds: Mapping[str, float]
    ) -> StudyProgress:
        """The progress of the study; trials whose speed is not known yet come last."""
        own = own_nodes(self.view.nodes, self.tuning.instances)
        mean = fmean(speeds.values())
        still_to_enter = self.state.quota - self.state.entered if stage == 0 else 0
        return StudyProgress(
            stage=stage,
            trials=len(trials) + still_to_enter,
            epochs_done=epochs_done,
            nodes=(*self.state.held.values(), *own),
            elapsed_s=self.view.now_s,
            spent_usd=self.state.spent_usd,
            trial_factors=tuple(speeds[trial] / mean for trial in trials if trial in speeds),
        )

    def _patience_s(self) -> float:
        """How long idle nodes wait for missing ones."""
        queue, init = self.tuning.profile.queue_s, self.tuning.profile.init_s
        return 60.0 + 2.0 * (queue.mean + init.mean + 3.0 * (queue.sd + init.sd))

    def _use_fewer_nodes(self) -> None:
        """Continue on the nodes that are here if no trial can run because others do not come."""
        state = self.state
        here = len(state.kept) - state.to_come
        waited_s = self.view.now_s - state.asked_s
        if state.runs or not state.pending or not here or waited_s < self._patience_s():
            return
        self._continue_on(
            here,
            f"{state.to_come} of {len(state.kept)} nodes have not come in {format_duration(waited_s)}; "
            f"the stage continues on {here}.",
        )
        state.start_pending()

    def _decision(self) -> Decision:
        state = self.state
        allocations: dict[str, Allocation] = {}
        here = {node.id for node in self.view.nodes}
        for trial, slot in state.runs.items():
            placed = state.allocation(slot)
            # A trial on a draining node keeps running there until its slot has all its nodes again.
            allocations[trial] = placed if here.issuperset(placed.nodes) else self.jobs[trial].allocation
        left = tuple(job for job in self.view.jobs if job.id not in self.stops)
        reasons = explain(replace(self.view, jobs=left), allocations, self._why)
        reasons.update((trial, Reason(ReasonCode.STOPPED, why)) for trial, why in self.stops.items())
        return Decision(
            allocations=allocations,
            batches={
                job.id: job.batch
                if job.batch is not None and job.allocation.worker_count == allocations[job.id].worker_count
                else requested_batch(job.job, allocations[job.id].worker_count)
                for job in left
                if job.id in allocations
            },
            reasons=reasons,
            stops=frozenset(self.stops),
            wish=self._wish(allocations),
            wake_at_s=self._wake_at_s(),
        )

    def _wake_at_s(self) -> float | None:
        """When to decide next although no event comes: to request nodes again, or when nodes are overdue."""
        if self.state.again_s is not None:
            return self.state.again_s
        at_s = self.state.asked_s + self._patience_s()
        idle = self.state.pending and self.state.to_come and not self.state.runs
        return at_s if idle and at_s > self.view.now_s else None

    def _wish(self, allocations: Mapping[str, Allocation]) -> Wish:
        """Request the stage's nodes and release all other rented ones; our own nodes always stay."""
        state = self.state
        in_use = {node for allocation in allocations.values() for node in allocation.nodes}
        kept = set(state.kept) | in_use
        release = tuple(node.id for node in self.view.nodes if node.instance and node.id not in kept)
        note_nodes(self.tuning, state, self.view, release)
        own = sum(not node.instance and node.id in kept for node in self.view.nodes)
        return Wish(((state.plan.instance, len(state.kept) - own),), release)

    def _why(self, job: JobView, code: ReasonCode) -> str:
        state, plan = self.state, self.state.plan
        stage = f"Stage {state.stage + 1} of {len(state.stages)}"
        if job.id in state.done:
            return f"{stage}: it reached the last epoch, {plan.last_epoch}, and waits for the others."
        if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
            if state.again_s is not None:
                return f"{stage}: {state.short}{again_text(state.in_vain, state.again_s)}"
            if state.to_come:
                missing = f"{state.to_come} of {len(state.kept)} nodes ({plan.instance})"
                return f"{stage}: {missing} have not come yet."
            return f"{stage}: {len(state.slots)} trials run at once, and all slots are taken."
        gpus = sum(state.slots[state.runs[job.id]].values())
        return (
            f"{stage}, to epoch {plan.last_epoch}: {counted(gpus, 'slot')} each on "
            f"{counted(len(state.kept), 'node')} "
            f"({plan.instance}). {state.short or state.footing.text}"
        )


def on_fewer(tuning: Tuning, stage: StagePlan, trials: int, nodes: int, slowness: float) -> StagePlan:
    """The stage on `nodes` nodes, in the fastest way for the `trials` trials left.

    Either each trial gets fewer GPUs, or they run in waves. The nodes are given, so the fastest way is also
    the cheapest.
    """
    gpus = nodes * tuning.instance(stage.instance).gpus
    options = [
        replace(stage, trials=trials, gpus_per_trial=each, at_once=min(trials, gpus // each), nodes=nodes)
        for each in range(1, min(stage.gpus_per_trial, gpus) + 1)
    ]
    held = (stage.instance, nodes)
    best = min(options, key=lambda option: steady_s(tuning, [option], held, slowness))
    return replace(best, trials=stage.trials)


def refusal_text(refusals: Sequence[NodeRefused], refused: int, planned: int) -> str:
    """A sentence about nodes that were refused."""
    why = "; ".join(dict.fromkeys(refusal.why for refusal in refusals))
    return f"{refused} of {planned} nodes were refused ({why})"


def again_at_s(refused_s: float, now_s: float, times: int, deadline_s: float | None) -> float:
    """When to request nodes again after all were refused `times` times in a row.

    The pause doubles each time. It is shorter near the deadline, so that there is still a last try. After a
    resume the time since the refusal counts as waiting.
    """
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 10), LONGEST_PAUSE_S)
    if deadline_s is not None:
        pause_s = min(pause_s, max((deadline_s - now_s) / 2.0, FIRST_PAUSE_S))
    return max(refused_s + pause_s, now_s + FIRST_PAUSE_S)


def again_text(times: int, at_s: float) -> str:
    """The end of a sentence: how often in a row nodes were refused, and when they are requested again."""
    often = f", {counted(times, 'time')} in a row" if times > 1 else ""
    return f"{often}; they are requested again at {format_duration(at_s)}."


def note_nodes(tuning: Tuning, state: PlanState, view: ClusterView, given_back: Iterable[str] = ()) -> None:
    """Books what nodes cost, from the beginning of their start-up until they are gone."""
    here = {node.id: node.instance for node in view.nodes if node.instance}
    gone = set(given_back) | (state.held.keys() - here.keys())
    for name in sorted(gone & state.held.keys()):
        state.spent_usd += _stay_usd(tuning, state.held.pop(name), view.now_s)
    for name, instance in here.items():
        if name not in gone and name not in state.held:
            state.held[name] = HeldNode(instance, view.now_s - tuning.profile.init_s.mean)
            state.spent_usd += tuning.billing.usd_per_new_node


def note_work(tuning: Tuning, state: PlanState, jobs: Iterable[JobView]) -> None:
    """Books GPU time since the last call, if it is billed by use."""
    if tuning.billing.per is not Per.FUNCTION:
        return
    for job in jobs:
        fresh_s = job.attained_gpu_s - state.counted_gpu_s.get(job.id, 0.0)
        state.spent_usd += fresh_s * _usd_per_gpu_s(tuning, state, job)
        state.counted_gpu_s[job.id] = job.attained_gpu_s


def _usd_per_gpu_s(tuning: Tuning, state: PlanState, job: JobView) -> float:
    """The price of a job's GPUs: our own (not rented) nodes have a price of their own."""
    instance = tuning.instance(state.plan.instance)
    rented_usd = instance.usd_per_hour / instance.gpus
    own_usd = next((node.usd_per_hour / node.gpus for node in tuning.own if node.gpus == instance.gpus), 0.0)
    gpus = dict(job.allocation.workers) or state.was.get(job.id, {})
    own = sum(count for node, count in gpus.items() if node in state.kept and node not in state.held)
    share = own / sum(gpus.values()) if gpus else 0.0
    return (rented_usd + share * (own_usd - rented_usd)) / HOUR_S


def _stay_usd(tuning: Tuning, node: HeldNode, until_s: float) -> float:
    if tuning.billing.per is not Per.INSTANCE:
        return 0.0
    charged_s = float(tuning.billing.charged_s(np.asarray(until_s - node.since_s)))
    return charged_s * tuning.instance(node.instance).usd_per_hour / HOUR_S


def _holding(stage: StagePlan) -> tuple[int, int, int, str]:
    return stage.gpus_per_trial, stage.at_once, stage.nodes, stage.instance
