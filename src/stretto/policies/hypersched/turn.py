"""One decision of HyperSched: which trials are cut, admitted and resized.

The deadline pool consists of the running trials that are at or above the cut-offs of their rungs. A trial
that fell below runs only on spare GPUs, that is GPUs that the pool could not use even at its largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.job import Tier
from stretto.planning.profile import Scaling
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.hypersched.memory import StudyMemory, mean_score
from stretto.policies.hypersched.reasons import (
    NO_SLOT_FOR_NEW,
    NO_SLOT_FOR_PAUSED,
    NO_TIME_FOR_NEW,
    NO_TIME_FOR_PAUSED,
    paused_waits,
    why_best,
    why_cut,
    why_fewer,
    why_holding,
    why_new,
    why_resized,
)
from stretto.policies.hypersched.rules import (
    LEAST_GAIN,
    HyperSchedOptions,
    Payoff,
    believed_scaling,
    catch_up_s,
    most_useful,
    on_grid,
    startup_s,
    time_needed_s,
)
from stretto.policies.trials import as_before, decide_counts, metric_text, share_out
from stretto.search.halving import finite_score, order


class HyperSchedTurn:
    """One decision about the trials of a study, from one view of them."""

    def __init__(self, tuning: Tuning, rules: HyperSchedOptions, view: ClusterView, memory: Memory) -> None:
        self._tuning = tuning
        self._study = tuning.study
        self._rules = rules
        self._view = view
        self._memory = StudyMemory.load(self._study, retrospective=rules.retrospective, memory=memory)
        self._trials = {job.job.id: job for job in view.jobs}
        for trial in [trial for trial in self._memory.live if trial not in self._trials]:
            self._memory.forget(trial)
        self._total = view.total_gpus
        self._counts = {
            trial: self._trials[trial].allocation.worker_count
            for trial in self._memory.live
            if self._trials[trial].allocation
        }
        deadline_s = tuning.limits.deadline_s
        self._left_s = math.inf if deadline_s is None else deadline_s - view.now_s
        self._why: dict[str, str] = {}
        self._stops: dict[str, str] = {}
        self._stays: dict[str, Reason] = {}
        """Reasons of trials that could be resized now, and are not."""
        self._believed: Scaling | None = None

    def decide(self) -> tuple[Decision, Memory]:
        """The decision and the new memory; after the deadline nothing changes any more."""
        if self._left_s <= 0.0:
            return as_before(self._view), self._memory.dump()
        news = self._read_results()
        self._check_admission()
        self._pause_fallen(news)
        self._stop_excluded()
        self._promote_and_admit()
        self._reallocate(news)
        return self._decision(), self._memory.dump()

    def _read_results(self) -> list[JobView]:
        """Reads new results, stops diverged trials and returns the others that have results.

        A trial that completed its last epoch is left out, since it is about to end by itself.
        """
        news = []
        for job in self._trials.values():
            if not self._memory.has_news(job):
                continue
            if self._memory.read(job, self._study, self._rules.score_window):
                if job.epoch < self._study.max_epochs:
                    news.append(job)
            else:
                self._stop(job.id, f"It diverged: {metric_text(self._study, None)} at epoch {job.epoch}.")
        return news

    def _check_admission(self) -> None:
        """Close admission once a newcomer would have too little time; a later deadline opens it again."""
        remembered, deadline_s = self._memory, self._tuning.limits.deadline_s
        if deadline_s is None or deadline_s > (remembered.closed_for_s or 0.0):
            remembered.closed_for_s = None
        if self._rules.admission and remembered.admitting:
            full_s = self._study.max_epochs * self._epoch_s
            needed_s = time_needed_s(self._study.eta, remembered.longest_s, self._startup_s, full_s)
            remembered.closed_for_s = None if self._left_s >= needed_s else deadline_s

    def _pause_fallen(self, news: Sequence[JobView]) -> None:
        """Pause trials that fell below the cut-off of a rung, except those that get spare GPUs."""
        live, rungs = self._memory.live, self._memory.rungs
        places = {job.job.id: rungs.fallen_at(job.job.id) for job in news if job.job.id in live}
        fell = {trial: place for trial, place in places.items() if place is not None}
        given = self._spare_gpus() if fell and not self._rules.published else {}
        for trial, place in fell.items():
            if trial not in given:
                self._why[trial] = why_cut(self._study, rungs, trial, place)
                del live[trial]
                self._counts.pop(trial, None)

    def _stop_excluded(self) -> None:
        """As published: once admission is closed, stop all trials that do not run."""
        if self._memory.admitting or not self._rules.published:
            return
        text = f"In the {self._left_s:.0f} s left it could not train long enough."
        for trial in self._waiting():
            self._stop(trial, f"{self._why[trial]} {text}" if trial in self._why else text)

    def _promote_and_admit(self) -> None:
        """Give free GPUs to trials that lost theirs, then to trials that are promoted or admitted."""
        if self._free < 0:
            self._shrink_to_cluster()
        free = self._free
        if not free:
            return
        again = "Its slots are gone, and another is free."
        lost = [trial for trial in self._memory.live if trial not in self._counts][:free]
        admitted = self._admitted(free - len(lost))
        for trial, gpus in {**dict.fromkeys(lost, 1), **admitted}.items():
            self._why[trial] = self._why_admitted(trial) if trial in admitted else again
            self._memory.live[trial] = self._rules.results_between
            self._counts[trial] = gpus

    def _reallocate(self, news: Iterable[JobView]) -> None:
        """Let trials that have just reported a result take their share."""
        live = self._memory.live
        due = []
        for job in news:
            if job.job.id in self._counts:
                live[job.job.id] -= 1
                if live[job.job.id] < 0:
                    due.append(job.job.id)
        if not due or self._rules.sharing == "none" or len(self._counts) >= self._total:
            return
        proposal = self._proposal()
        changing = [trial for trial in due if proposal.get(trial, 0) not in {0, self._counts[trial]}]
        if not self._rules.published:  # trials that give GPUs come before those that take them
            changing.sort(key=lambda trial: proposal[trial] > self._counts[trial])
        for trial in changing:
            self._take_share(trial, proposal, at_once=changing)

    def _decision(self) -> Decision:
        jobs, counts = self._view.jobs, self._counts
        why_waits = self._waiting_reasons()
        waits = {job.job.id: why_waits(job) for job in jobs if job.job.id not in counts}
        if not self._why and not self._stops:
            return Decision(
                allocations={job.job.id: job.allocation for job in jobs if job.job.id in counts},
                reasons={**waits, **self._stays},
            )
        why = {trial: reason.text for trial, reason in waits.items()} | self._why
        decision = decide_counts(self._view, counts, why, stops=self._stops)
        return replace(decision, reasons={**self._stays, **decision.reasons})

    def _waiting_reasons(self) -> Callable[[JobView], Reason]:
        """The reason of a trial that waits: no slot, no time, or a cut-off."""
        closed, late, cut = not self._memory.admitting, self._is_late, paused_waits(self._study)
        largest = self._largest  # looks at all trials, so it is not asked for each of them

        def reason(job: JobView) -> Reason:
            if job.results and not late:
                return cut
            in_time = not closed or self._is_worth_a_start(job.job.id, largest if job.results else 1)
            if not job.results:
                return NO_SLOT_FOR_NEW if in_time else NO_TIME_FOR_NEW
            return NO_SLOT_FOR_PAUSED if in_time else NO_TIME_FOR_PAUSED

        return reason

    def _admitted(self, free: int) -> dict[str, int]:
        """Trials to admit when `free` GPUs are free, with the GPUs of each: one, or more of spare GPUs."""
        candidates = self._candidates() if self._memory.admitting else []
        if candidates or self._rules.published:
            return dict.fromkeys(candidates[: max(free, 0)], 1)
        let_in: dict[str, int] = {}
        for trial, gpus in self._spare_gpus().items():
            if trial not in self._memory.live and free > 0:
                let_in[trial] = on_grid(min(gpus, free), self._rules.grid)
                free -= let_in[trial]
        return let_in

    def _spare_gpus(self) -> dict[str, int]:
        """Who gets the spare GPUs, and how many; none are spare while admission is open and trials wait."""
        if self._memory.admitting and self._candidates():
            return {}
        live, rungs, largest = self._memory.live, self._memory.rungs, self._largest
        fallen = rungs.fallen()
        outside = {trial: self._trials[trial] for trial in live if trial in fallen} | self._waiting()
        line = claim_order(
            {trial: self._score_in_line(trial) for trial, job in outside.items() if job.results},
            [trial for trial, job in outside.items() if not job.results],
            holding=[] if self._is_late else rungs.holding(),
            running=live,
            late=self._is_late,
        )
        return share_spare(
            line,
            self._total - largest * sum(trial not in fallen for trial in live),
            most=lambda trial: largest if outside[trial].results else 1,
            is_worth=lambda trial, gpus: trial in live or self._is_worth_a_start(trial, gpus),
        )

    def _is_worth_a_start(self, trial: str, gpus: int) -> bool:
        """Whether a trial would complete a new epoch by the deadline; a rigid one starts from scratch."""
        job = self._trials[trial]
        epochs = job.epoch + 1 if job.job.tier is Tier.RIGID else 1
        return self._payoff.is_worth(epochs * self._single_s(trial), 0, gpus)

    def _candidates(self) -> list[str]:
        """Paused trials that may be promoted, the farthest and best first; then new trials."""
        waiting = self._waiting()
        if not waiting:
            return []
        new = [trial for trial, job in waiting.items() if not job.results]
        return [trial for trial in self._memory.rungs.holding() if trial in waiting] + new

    def _waiting(self) -> dict[str, JobView]:
        """Trials that are paused or new."""
        live, stops = self._memory.live, self._stops
        return {trial: job for trial, job in self._trials.items() if trial not in live and trial not in stops}

    def _take_share(self, trial: str, proposal: Mapping[str, int], at_once: Collection[str]) -> None:
        held, share = self._counts[trial], proposal[trial]
        if share - held > self._free:
            return
        payoff = self._payoff
        if not self._pays(trial, proposal, at_once):
            self._stays[trial] = Reason(ReasonCode.KEPT, payoff.why_not(held, share))
            return
        if payoff.gain(held, share) > LEAST_GAIN:
            self._why[trial] = why_resized(held, share, payoff.gain(held, share), self._left_s)
        else:
            takers = self._takers(proposal, at_once, self._free + held - share)
            self._why[trial] = why_fewer(held, share, list(takers)[: held - share])
        self._counts[trial] = share
        self._memory.live[trial] = self._rules.results_between

    def _pays(self, trial: str, proposal: Mapping[str, int], at_once: Collection[str]) -> bool:
        """Whether a resize pays by the deadline: for the trial, or for the trials that get its GPUs."""
        held, share = self._counts[trial], proposal[trial]
        gives = share < held
        if gives and self._rules.published:
            return True
        if self._payoff.is_worth(self._single_s(trial), held, share):
            return True
        return gives and sum(self._takers(proposal, at_once, self._free + held - share).values()) > self._free

    def _takers(self, proposal: Mapping[str, int], at_once: Collection[str], free: int) -> dict[str, int]:
        """Trials that would gain if `free` GPUs were free, and how many each would take.

        These are trials that would be admitted, and trials that have less than their share. Those in
        `at_once` may take GPUs now, others only after some more results.
        """
        starts = self._admitted(free)
        takers = {trial: gpus for trial, gpus in starts.items() if self._is_worth_a_start(trial, gpus)}
        for trial, share in proposal.items():
            held = self._counts.get(trial, 0)
            wait_s = 0.0 if trial in at_once or not held else self._wait_s(trial, held)
            if share > held and self._payoff.is_worth(self._single_s(trial), held, share, wait_s=wait_s):
                takers[trial] = share - held
        return takers

    def _wait_s(self, trial: str, held: int) -> float:
        """Seconds until a trial has reported enough results to take its share."""
        results = max(self._memory.live[trial], 0) + 1
        epoch_s = self._single_s(trial) / self._scaling.speedup(held)
        return max(results * epoch_s - (self._trials[trial].epoch_age_s or 0.0), 0.0)

    def _shrink_to_cluster(self) -> None:
        """Share out again, since GPUs that trials hold are about to go."""
        proposal = self._proposal()
        for trial, held in self._counts.items():
            if proposal.get(trial) != held:
                left = "1 slot is" if self._total == 1 else f"{self._total} slots are"
                self._why[trial] = f"Only {left} left."
        self._counts = {trial: count for trial, count in proposal.items() if trial in self._counts}

    def _proposal(self) -> dict[str, int]:
        scores = {trial: self._score(trial) for trial in self._memory.live}
        best_first = sorted(scores, key=lambda trial: order(scores[trial], trial))
        grid = self._rules.grid
        at_most = on_grid(max(1, self._total - len(scores) + 1), grid)  # the rest goes to the next trial
        shares = share_out(best_first, self._total, min(self._most, at_most), self._rules.sharing)
        return {trial: on_grid(share, grid) for trial, share in shares.items()}

    def _score(self, trial: str) -> float | None:
        return mean_score(self._study, self._trials[trial].results, self._rules.score_window)

    def _score_in_line(self, trial: str) -> float | None:
        """Its score in line; for a running trial its best, so that one poor epoch does not pause it."""
        if trial not in self._memory.live:
            return self._score(trial)
        scores = (finite_score(self._study, result.value) for result in self._trials[trial].results)
        return max((score for score in scores if score is not None), default=None)

    def _stop(self, trial: str, text: str) -> None:
        self._stops[trial] = text
        self._counts.pop(trial, None)
        self._memory.forget(trial)

    def _why_admitted(self, trial: str) -> str:
        job, spare = self._trials[trial], not self._memory.admitting
        if not job.results:
            return why_new(self._left_s, spare=spare)
        if not self._is_late and self._memory.rungs.fallen_at(trial) is None:
            return why_holding(self._study, self._left_s, spare=spare)
        return why_best(self._study, self._score(trial), job.epoch, self._left_s, spare=spare)

    @property
    def _is_late(self) -> bool:
        """Whether a newcomer cannot catch up with the farthest trial by the deadline, even at its largest."""
        if self._memory.admitting:
            return False
        epoch_s = self._epoch_s / self._scaling.speedup(self._largest)
        return self._left_s < catch_up_s(self._memory.farthest, epoch_s, self._startup_s)

    @property
    def _epoch_s(self) -> float:
        """Time of a typical trial's epoch on one GPU."""
        return self._memory.single_epoch_s(self._tuning.profile.latency.epoch_s)

    @property
    def _free(self) -> int:
        return self._total - sum(self._counts.values())

    @property
    def _startup_s(self) -> float:
        return startup_s(self._memory.starts_s) if self._rules.overhead else 0.0

    @property
    def _payoff(self) -> Payoff:
        published, believed_s = self._rules.published, self._tuning.profile.start_s
        unseen = self._rules.overhead and not self._memory.starts_s and not published
        return Payoff(
            scaling=self._scaling,
            left_s=self._left_s,
            startup_s=believed_s if unseen else self._startup_s,
            whole_epochs=not published,
        )

    def _single_s(self, trial: str) -> float:
        return self._memory.own_epoch_s(trial, self._tuning.profile.latency.epoch_s)

    @property
    def _scaling(self) -> Scaling:
        if self._believed is None:
            given, seen = self._tuning.profile.scaling, self._memory.speedups
            self._believed = believed_scaling(self._rules.belief, given, self._total, seen)
        return self._believed

    @property
    def _largest(self) -> int:
        """The most GPUs that a trial may get."""
        return 1 if self._rules.sharing == "none" else self._most

    @property
    def _most(self) -> int:
        """The most GPUs that make a trial faster, within its limits and the cluster."""
        allowed = (job.job.worker.max for job in self._trials.values())
        most = most_useful(self._scaling, max(1, min((self._total, *allowed))))
        return on_grid(most, self._rules.grid)


def claim_order(
    scores: Mapping[str, float | None],
    new: Iterable[str],
    *,
    holding: Iterable[str],
    running: Collection[str],
    late: bool,
) -> list[str]:
    """The order in which trials outside the pool may claim GPUs; `scores` has those that are not new.

    While a new trial can still catch up with the farthest one, the order is: trials `holding` their rungs,
    new trials, trials that fell. When it is too `late` for that, the better metric comes first, whatever the
    rungs say. Of two equal trials the running one comes first.
    """
    best_first = sorted(scores, key=lambda trial: (order(scores[trial], ""), trial not in running, trial))
    if late:
        return [*best_first, *new]
    return list(dict.fromkeys([*(trial for trial in holding if trial in scores), *new, *best_first]))


def share_spare(
    line: Iterable[str], spare: int, *, most: Callable[[str], int], is_worth: Callable[[str, int], bool]
) -> dict[str, int]:
    """Gives spare GPUs to the trials in line, to each at most what it can use.

    A trial that would gain nothing by the deadline is skipped.
    """
    given: dict[str, int] = {}
    for trial in line:
        share = min(most(trial), spare)
        if share <= 0:
            break
        if is_worth(trial, share):
            given[trial] = share
            spare -= share
    return given
