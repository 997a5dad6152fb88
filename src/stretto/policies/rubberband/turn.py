"""One decision in the execution of a plan: what happened since the last, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

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
from stretto.policies.rubberband.drift import epoch_s, finish_s, observed, steady_s
from stretto.policies.rubberband.memory import PlanBasis, PlanState, cut_to, own_nodes, usable
from stretto.policies.trials import is_diverged, metric_text
from stretto.pricing.billing import Per


def note_nodes(tuning: Tuning, course: PlanState, view: ClusterView, given_back: Iterable[str] = ()) -> None:
    """Nodes begin to cost when their start-up begins, and cease when they are gone."""
    here = {node.id: node.instance for node in view.nodes if node.instance}
    gone = set(given_back) | (course.held.keys() - here.keys())
    for name in sorted(gone & course.held.keys()):
        course.spent_usd += _stay_usd(tuning, course.held.pop(name), view.now_s)
    for name, instance in here.items():
        if name not in gone and name not in course.held:
            course.held[name] = HeldNode(instance, view.now_s - tuning.profile.init_s.mean)
            course.spent_usd += tuning.billing.usd_per_new_node


def note_work(tuning: Tuning, course: PlanState, jobs: Iterable[JobView]) -> None:
    """GPU time since it was last counted, at the price of the stage's nodes that it was used on."""
    if tuning.billing.per is not Per.FUNCTION:
        return
    for job in jobs:
        fresh_s = job.attained_gpu_s - course.counted_gpu_s.get(job.id, 0.0)
        course.spent_usd += fresh_s * _usd_per_gpu_s(tuning, course, job)
        course.counted_gpu_s[job.id] = job.attained_gpu_s


def _usd_per_gpu_s(tuning: Tuning, course: PlanState, job: JobView) -> float:
    """Nodes of the stage that were never rented are there anyway, and have their own price."""
    instance = tuning.instance(course.plan.instance)
    rented_usd = instance.usd_per_hour / instance.gpus
    own_usd = next((node.usd_per_hour / node.gpus for node in tuning.own if node.gpus == instance.gpus), 0.0)
    gpus = dict(job.allocation.workers) or course.was.get(job.id, {})
    own = sum(count for node, count in gpus.items() if node in course.kept and node not in course.held)
    share = own / sum(gpus.values()) if gpus else 0.0
    return (rented_usd + share * (own_usd - rented_usd)) / HOUR_S


def _stay_usd(tuning: Tuning, node: HeldNode, until_s: float) -> float:
    if tuning.billing.per is not Per.INSTANCE:
        return 0.0
    charged_s = float(tuning.billing.charged_s(np.asarray(until_s - node.since_s)))
    return charged_s * tuning.instance(node.instance).usd_per_hour / HOUR_S


FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


def on_fewer(tuning: Tuning, stage: StagePlan, trials: int, nodes: int, slowness: float) -> StagePlan:
    """The stage on so many nodes, as fast as its trials that are left get through it there.

    Each of them gets fewer GPUs, or they take turns, whichever is done first; time is money here, since
    the nodes are given.
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
    """What did not come and why, in words."""
    why = "; ".join(dict.fromkeys(refusal.why for refusal in refusals))
    return f"{refused} of {planned} nodes were refused ({why})"


def again_at_s(refused_s: float, now_s: float, times: int, deadline_s: float | None) -> float:
    """When nodes that were all refused, so many times in a row, are asked for again.

    The pause doubles from time to time, but for a last try before the deadline; a run that was resumed
    has waited already.
    """
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 10), LONGEST_PAUSE_S)
    if deadline_s is not None:
        pause_s = min(pause_s, max((deadline_s - now_s) / 2.0, FIRST_PAUSE_S))
    return max(refused_s + pause_s, now_s + FIRST_PAUSE_S)


def again_text(times: int, at_s: float) -> str:
    """How often in a row that was, and when nodes are asked for again, in words."""
    often = f", {counted(times, 'time')} in a row" if times > 1 else ""
    return f"{often}; they are asked for again at {format_duration(at_s)}."


CHECKS = 8
"""How often in a stage it is looked at whether the deadline is in danger."""


class Replan(Protocol):
    """Makes a new plan from where the study is; epochs take `slowness` times what the profile says."""

    def __call__(self, start: StudyProgress, slowness: float) -> tuple[list[StagePlan], PlanBasis]: ...


@dataclass(slots=True)
class RubberBandTurn:
    """What is being decided."""

    tuning: Tuning
    course: PlanState
    view: ClusterView
    replan: Replan
    tolerance: float
    """Relative error of the finish time beyond which a new plan is made; 0: never."""
    stops: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, JobView] = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = {job.id: job for job in self.view.jobs}

    def decide(self) -> Decision:
        """Take note of everything new, and go on from there."""
        course = self.course
        note_nodes(self.tuning, course, self.view)
        if self._here():
            course.again_s, course.in_vain = None, 0
        elif course.again_s is not None and self.view.now_s >= course.again_s:
            course.again_s = None
        if not course.slots and course.again_s is None:
            self._lay_out()
        self._match()
        self._hear_refusals()
        self._read_results()
        self._admit()
        while course.living and len(course.done) == len(course.living) and not course.is_last:
            self._advance()
        self._watch_deadline()
        course.seat()
        self._make_do()
        nobody_else = not course.pending and (course.stage > 0 or course.entered == course.quota)
        if nobody_else and (course.is_last or not course.living):
            course.give_up_idle()
        return self._decision()

    def _here(self) -> list[str]:
        plan = self.course.plan
        return usable(self.view.nodes, plan.instance, self.tuning.instance(plan.instance).gpus)

    def _lay_out(self) -> None:
        """Slots for the stage as planned, or for the trials that are left."""
        course, plan = self.course, self.course.plan
        size = self.tuning.instance(plan.instance).gpus
        left = len(course.living) - len(course.done) if course.entered == course.quota else plan.trials
        at_once, nodes = cut_to(plan, left, size)
        course.lay_out(self._here(), nodes, plan.gpus_per_trial, size, at_once)
        course.asked_s = self.view.now_s
        watched = self.tolerance > 0 and self.tuning.limits.deadline_s is not None
        course.check_s = self.view.now_s + self._check_after_s() if watched else None

    def _check_after_s(self) -> float:
        plan = self.course.plan
        work_s = plan.waves * plan.epochs * epoch_s(self.tuning, plan, self.course.footing.slowness)
        return max(work_s / CHECKS, 1.0)

    def _match(self) -> None:
        """Bring the course up to what is here: nodes, and trials that ended or lost their nodes."""
        course = self.course
        if course.match_nodes(self._here()):
            course.asked_s = self.view.now_s
        for trial in [trial for trial in course.living if trial not in self.jobs]:
            course.leave(trial)
        course.runs = {trial: slot for trial, slot in course.runs.items() if self.jobs[trial].allocation}

    def _hear_refusals(self) -> None:
        """Nobody waits for nodes that will not come; they may be wished for again in the next stage."""
        course = self.course
        fresh = [
            refusal
            for refusal in self.view.refused[course.refusals :]
            if refusal.instance == course.plan.instance
        ]
        course.refusals = len(self.view.refused)
        planned = len(course.kept)
        refused = min(sum(refusal.count for refusal in fresh), course.to_come)
        if not refused:
            return
        dropped, text = course.expect_less(refused), refusal_text(fresh, refused, planned)
        if not course.kept:
            course.in_vain += 1
            at_s = again_at_s(fresh[-1].t_s, self.view.now_s, course.in_vain, self.tuning.limits.deadline_s)
            course.stand_by(at_s, text)
        elif course.give_up_slots(dropped) and self._left():
            self._go_on_with(len(course.kept), f"{text}; it goes on with {len(course.kept)}.")

    def _left(self) -> int:
        """Trials that are to run in this stage, now or later."""
        course = self.course
        to_enter = course.quota - course.entered if course.stage == 0 else 0
        return len(course.living) - len(course.done) + to_enter

    def _go_on_with(self, nodes: int, why: str) -> None:
        """The rest of the stage on so many nodes, some of which may be still to come."""
        course, left = self.course, self._left()
        stage = on_fewer(self.tuning, course.plan, left, nodes, course.footing.slowness)
        course.cut_down(stage)
        held = {trial: self.jobs[trial].allocation for trial in course.living if trial not in course.done}
        course.was.update(
            (trial, dict(allocation.workers)) for trial, allocation in held.items() if allocation
        )
        here = [node for node in self._here() if node in course.kept]
        size = self.tuning.instance(stage.instance).gpus
        course.lay_out(here, nodes, stage.gpus_per_trial, size, stage.at_once)
        course.short = why

    def _read_results(self) -> None:
        """Stop trials that diverged; those at the end of the stage wait there."""
        course, plan = self.course, self.course.plan
        for trial in [trial for trial in course.living if trial not in course.done]:
            job = self.jobs[trial]
            if not job.results:
                continue
            last = job.results[-1]
            if is_diverged(job):
                self._stop(
                    trial, f"Its {self.tuning.study.metric} is not a finite number at epoch {last.epoch}."
                )
            elif last.epoch >= plan.last_epoch and not course.is_last:
                at_end = next(r for r in reversed(job.results) if r.epoch <= plan.last_epoch)
                course.done[trial] = self.tuning.study.score(at_end.value)
                course.was[trial] = dict(job.allocation.workers)
                course.runs.pop(trial, None)

    def _stop(self, trial: str, why: str) -> None:
        note_work(self.tuning, self.course, [self.jobs[trial]])
        self.stops[trial] = why
        self.course.leave(trial)

    def _admit(self) -> None:
        """The first stage takes as many trials as planned; nobody else is wanted."""
        course = self.course
        for trial in self.jobs:
            if trial in course.living or trial in self.stops:
                continue
            if course.stage == 0 and course.entered < course.quota:
                course.entered += 1
                course.living.append(trial)
            else:
                self.stops[trial] = f"The plan has {course.quota} trials, which have all begun."

    def _advance(self) -> None:
        """The stage is over: the best go on, the others stop, nodes that come free are given back."""
        course, plan = self.course, self.course.plan
        ranked = sorted(course.done, key=lambda trial: (-course.done[trial], trial))
        speeds = observed(self.tuning, course, self.jobs)
        note_work(self.tuning, course, [self.jobs[trial] for trial in ranked])
        best = ranked[: course.stages[course.stage + 1].trials]
        for rank, trial in enumerate(ranked[len(best) :], start=len(best) + 1):
            shown = metric_text(self.tuning.study, course.done[trial])
            self._stop(
                trial,
                f"Rank {rank} of {len(ranked)} at epoch {plan.last_epoch}, with {shown}; "
                f"the best {len(best)} go on.",
            )
        if self._drifted({trial: speeds[trial] for trial in best if trial in speeds}):
            start = self._progress(course.stage + 1, best, 0, speeds)
            course.adopt(course.stage + 1, *self.replan(start, fmean(speeds.values())))
        course.stage, course.whole = course.stage + 1, None
        course.living, course.done = best, {}
        self._lay_out()

    def _drifted(self, speeds: Mapping[str, float]) -> bool:
        """Whether the stages to come will end at another time than was expected, or too late."""
        if not self.tolerance or not speeds:
            return False
        course, footing = self.course, self.course.footing
        held = (course.plan.instance, len(course.kept))
        later_s = steady_s(self.tuning, course.stages[course.stage + 1 :], held, fmean(speeds.values()))
        end_s = self.view.now_s + later_s * footing.stretch
        deadline_s = self.tuning.limits.deadline_s
        off = abs(end_s - footing.finish_s) > self.tolerance * (footing.finish_s - footing.made_s)
        return off or (deadline_s is not None and end_s > deadline_s)

    def _watch_deadline(self) -> None:
        """Once in a stage the plan may be changed on the way, if it would miss the deadline."""
        course, now_s, deadline_s = self.course, self.view.now_s, self.tuning.limits.deadline_s
        if course.check_s is None or now_s < course.check_s or deadline_s is None or not course.living:
            return
        course.check_s = now_s + self._check_after_s()
        speeds = observed(self.tuning, course, self.jobs)
        if not speeds:
            return
        slowness = fmean(speeds.values())
        if finish_s(self.tuning, course, now_s, self.jobs, slowness) > deadline_s:
            self._rescue(speeds, slowness)

    def _rescue(self, speeds: Mapping[str, float], slowness: float) -> None:
        course, old = self.course, self.course.plan
        alive = [self.jobs[trial] for trial in course.living]
        note_work(self.tuning, course, alive)
        behind = fmean(min(job.epoch, old.last_epoch) for job in alive) - old.first_epoch + 1
        start = self._progress(course.stage, course.living, max(int(behind), 0), speeds)
        stages, footing = self.replan(start, slowness)
        stages[0] = replace(stages[0], first_epoch=old.first_epoch)
        course.adopt(course.stage, stages, footing)
        if _holding(course.plan) != _holding(old):
            course.was.update((job.id, dict(job.allocation.workers)) for job in alive if job.allocation)
            self._lay_out()
        course.check_s = None

    def _progress(
        self, stage: int, trials: Sequence[str], epochs_done: int, speeds: Mapping[str, float]
    ) -> StudyProgress:
        """Where the study stands. Trials whose speed is not known yet come last."""
        own = own_nodes(self.view.nodes, self.tuning.instances)
        mean = fmean(speeds.values())
        still_to_enter = self.course.quota - self.course.entered if stage == 0 else 0
        return StudyProgress(
            stage=stage,
            trials=len(trials) + still_to_enter,
            epochs_done=epochs_done,
            nodes=(*self.course.held.values(), *own),
            elapsed_s=self.view.now_s,
            spent_usd=self.course.spent_usd,
            trial_factors=tuple(speeds[trial] / mean for trial in trials if trial in speeds),
        )

    def _patience_s(self) -> float:
        """Nodes that take longer than this are not waited for while others stand idle."""
        queue, init = self.tuning.profile.queue_s, self.tuning.profile.init_s
        return 60.0 + 2.0 * (queue.mean + init.mean + 3.0 * (queue.sd + init.sd))

    def _make_do(self) -> None:
        """Where no trial can run because nodes do not come, those that are here must be enough."""
        course = self.course
        here = len(course.kept) - course.to_come
        waited_s = self.view.now_s - course.asked_s
        if course.runs or not course.pending or not here or waited_s < self._patience_s():
            return
        self._go_on_with(
            here,
            f"{course.to_come} of {len(course.kept)} nodes have not come in {format_duration(waited_s)}; "
            f"it goes on with {here}.",
        )
        course.seat()

    def _decision(self) -> Decision:
        course = self.course
        allocations: dict[str, Allocation] = {}
        here = {node.id for node in self.view.nodes}
        for trial, slot in course.runs.items():
            placed = course.allocation(slot)
            # A trial on a node that drains runs on there until its slot is whole again.
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
        """Nothing runs, and nodes are to come or were refused: ask again when they are overdue."""
        if self.course.again_s is not None:
            return self.course.again_s
        at_s = self.course.asked_s + self._patience_s()
        idle = self.course.pending and self.course.to_come and not self.course.runs
        return at_s if idle and at_s > self.view.now_s else None

    def _wish(self, allocations: Mapping[str, Allocation]) -> Wish:
        """The stage's nodes and no other; those that are simply there are not asked for or given back."""
        course = self.course
        in_use = {node for allocation in allocations.values() for node in allocation.nodes}
        kept = set(course.kept) | in_use
        release = tuple(node.id for node in self.view.nodes if node.instance and node.id not in kept)
        note_nodes(self.tuning, course, self.view, release)
        own = sum(not node.instance and node.id in kept for node in self.view.nodes)
        return Wish(((course.plan.instance, len(course.kept) - own),), release)

    def _why(self, job: JobView, code: ReasonCode) -> str:
        course, plan = self.course, self.course.plan
        stage = f"Stage {course.stage + 1} of {len(course.stages)}"
        if job.id in course.done:
            return f"{stage}: at its last epoch, {plan.last_epoch}, it waits for the others."
        if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
            if course.again_s is not None:
                return f"{stage}: {course.short}{again_text(course.in_vain, course.again_s)}"
            if course.to_come:
                return f"{stage}: {course.to_come} of {len(course.kept)} nodes ({plan.instance}) are to come."
            return f"{stage}: {len(course.slots)} trials run at once, and all places are taken."
        gpus = sum(course.slots[course.runs[job.id]].values())
        return (
            f"{stage}, to epoch {plan.last_epoch}: {counted(gpus, 'slot')} each on "
            f"{counted(len(course.kept), 'node')} "
            f"({plan.instance}). {course.short or course.footing.text}"
        )


def _holding(stage: StagePlan) -> tuple[int, int, int, str]:
    return stage.gpus_per_trial, stage.at_once, stage.nodes, stage.instance
