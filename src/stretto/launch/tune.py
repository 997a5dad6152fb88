"""Tuning a study for real: planned, begun or resumed, and what came of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.units import format_duration
from stretto.driving.drive import NoObserver, Observer, RealRun, drive, wall_clock
from stretto.driving.early_stop import EarlyStop
from stretto.driving.request import Checked, TuneRequest, check_request
from stretto.driving.stop import Stop, interrupting
from stretto.driving.substrate import MakeSubstrate, TrainingSpec
from stretto.driving.target import LOCAL, OpenTarget, local_devices
from stretto.inputs.arguments import (
    deadline_words,
    given_budget_usd,
    given_deadline_s,
    given_flag,
    given_options,
    given_path,
    given_progress,
    given_text,
    given_whole,
    given_work,
)
from stretto.inputs.profile import read_profile
from stretto.inputs.work import CommandLine
from stretto.journal.folds.cost import BudgetCap, CostMeter
from stretto.launch.expect import (
    PLANNING_S,
    PLANNING_SHARE,
    Expectation,
    after_loading,
    after_measuring,
    as_agreed,
    check_pays_an_epoch,
    expect,
    stopping_s,
    until,
    with_own,
)
from stretto.launch.extend import extend, let_go_of_nodes
from stretto.launch.progress import measuring_line, telling
from stretto.planning.tuning import Tuning
from stretto.policies.registry import make_policy
from stretto.pricing.instances import Offer
from stretto.profiling.probe import OnProgress
from stretto.profiling.speeds import speeds_of
from stretto.runs.begin import begin, check_room, check_same
from stretto.runs.deadline import AtDeadline, EndedBy, what_lets_go_on
from stretto.runs.folder import RUNS, RunSpec, first_nodes
from stretto.runs.mend import mend
from stretto.runs.results import TuneResult, best_tables, plan_tables, read_prediction, tune_result
from stretto.runs.status import check_free, holding, read_ending
from stretto.runs.store import check_unclaimed
from stretto.search.samplers import make_sampler
from stretto.search.source import TrialSource, trials_ahead
from stretto.simulation.replay import Replayed, replay
from stretto.simulation.studies import OutOfTimeError
from stretto.system.locks import myself

COMPARED = ("asha", "hypersched")
"""The policy a run is compared with; the second where it is the first itself."""
COMPARING_S = 3.0
"""The replay may take so long: the summary of a run waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A study that was checked, measured and planned, and can be begun or resumed."""

    checked: Checked
    tuning: Tuning
    """Its deadline is the first start's if there was one, else counts from `at_s`."""
    offer: Offer
    """What there was when the run was begun, or is."""
    at_s: float
    """When it was prepared, by the monotonic clock."""
    expectation: Expectation
    speeds: str
    """Where its speeds are from, in words."""
    resumes: bool

    def now(self) -> Prepared:
        """With the deadline from now, which does not move while somebody makes up their mind."""
        limits, now_s = self.tuning.limits, time.monotonic()
        if self.resumes or limits.deadline_s is None:
            return self
        waited = f": {format_duration(now_s - self.at_s)} passed between the plan and its start"
        left_s = self.checked.left_s(now_s, waited)
        tuning = dataclasses.replace(self.tuning, limits=dataclasses.replace(limits, deadline_s=left_s))
        return dataclasses.replace(self, tuning=tuning, at_s=now_s)


def finished(checked: Checked) -> TuneResult | None:
    """What a run of this name came to, if it is over; InputError if it was begun otherwise.

    One that somebody still drives past its deadline is refused, too. If its deadline passed while it was
    dead, what it had launched is let go of first.
    """
    folder = checked.folder
    spec = folder.spec()
    if spec is None:
        return None
    check_same(folder, spec, "tune", checked.asked)
    ended_by, deadline_s = read_ending(folder), spec.deadline_s
    if ended_by is None and deadline_s is not None and time.time() - spec.started_at_s >= deadline_s:
        check_free(folder)
        let_go_of_nodes(folder, checked.target, checked.outline.rented, spec.started_at_s)
        ended_by = EndedBy.DEADLINE
    return None if ended_by is None else tune_result(folder, ended_by)


def prepare(
    checked: Checked,
    *,
    make: MakeSubstrate | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Prepared:
    """Measure what is not known, and say what to expect; no trial is started.

    The time this takes counts against the deadline, which is from when the command was given. `make` takes
    the place of the target's own substrate.
    """
    asked_s = checked.request.asked_s
    check_room(checked.folder.path)
    if checked.request.store:
        check_unclaimed(checked.request.store, checked.folder.path)
    with checked.target.opened() as target:
        spec = checked.folder.spec()
        offer = target.offer if spec is None or spec.offer is None else spec.offer
        speeds = speeds_of(checked, target, offer, make=make, on_progress=on_progress)
    measured_s = time.monotonic()
    begun = first_nodes(checked.folder)
    held = target.held if begun is None else begun

    def tuning_now() -> Tuning:
        """Expecting takes time, too."""
        spent = (
            f": {format_duration(measured_s - asked_s)} went to finding out how fast it trains, "
            f"{format_duration(time.monotonic() - measured_s)} to planning"
        )
        left_s = checked.left_s(time.monotonic(), spent) if spec is None else spec.deadline_s
        tuning = checked.tuning(speeds.profile, offer, left_s)
        return with_own(tuning, held, checked.outline.machine) if checked.rents else tuning

    tuning = tuning_now()
    request, deadline_s = checked.request, tuning.limits.deadline_s
    kept = read_prediction(checked.folder)
    if kept is not None:
        expectation = Expectation(finish_s=kept.finish_s, cost_usd=kept.cost_usd, epochs=kept.epochs)
    else:
        policy, options, loading_s = request.policy, request.options, _loading_s(checked)
        check_pays_an_epoch(tuning, loading_s, rents=checked.rents)
        found = expect(
            checked.outline,
            tuning,
            policy,
            options,
            request.seed,
            nodes=held,
            loading_s=loading_s,
            within_s=PLANNING_S if deadline_s is None else min(PLANNING_S, PLANNING_SHARE * deadline_s),
        )
        found = after_loading(found, loading_s, deadline_s)
        limits = tuning_now().limits
        found = until(found, limits.deadline_s, limits.budget_usd)
        expectation = after_measuring(found, checked.measuring_usd)
    return Prepared(
        checked=checked,
        at_s=time.monotonic(),
        tuning=tuning_now(),
        offer=offer,
        expectation=expectation,
        speeds=speeds.source,
        resumes=checked.folder.is_begun,
    )


def start(
    prepared: Prepared,
    *,
    stop: Stop | None = None,
    observer: Observer | None = None,
    make: MakeSubstrate | None = None,
) -> TuneResult:
    """Begin the run, or go on with it, until it is over or `stop` is asked."""
    checked = prepared.checked
    with holding(checked.folder, local_devices(checked.target)), checked.target.opened() as target:
        return _start(prepared.now(), target, make or target.make, stop or Stop(), observer or NoObserver())


def _start(
    prepared: Prepared, target: OpenTarget, make: MakeSubstrate, stop: Stop, observer: Observer
) -> TuneResult:
    checked, tuning = prepared.checked, prepared.tuning
    folder = checked.folder
    spec = begin(
        folder,
        RunSpec(
            kind="tune",
            started_at_s=time.time(),
            command=myself().command,
            asked=checked.asked,
            slots=prepared.offer.slots,
            offer=prepared.offer,
            deadline_s=tuning.limits.deadline_s,
            budget_usd=checked.limits.budget_usd,
            file=str(checked.outline.path.absolute()),
        ),
    )
    if folder.read("plan") is None:
        folder.write("plan", plan_tables(prepared.expectation))
    guarded = EarlyStop(folder, tuning.study, observer)
    ended_by = drive(_score(prepared, target, make, spec.started_at_s), stop, guarded)
    if ended_by.for_good:
        folder.write("result", {"ended_by": str(ended_by)})
    result = tune_result(folder, ended_by)
    if ended_by.for_good:
        folder.write("result", {"ended_by": str(ended_by), **best_tables(result)})
    return result


def tune(
    study: Path | str,
    work: str | Sequence[str] | None = None,
    *,
    deadline: float | str | None = None,
    policy: str = "hypersched",
    budget_usd: float | None = None,
    on: str = LOCAL,
    store: str = "",
    slots: int | None = None,
    name: str | None = None,
    folder: Path | str = RUNS,
    options: Mapping[str, str] | None = None,
    seed: int = 0,
    at_deadline: str = AtDeadline.STOP,
    retries: int = 2,
    tensorboard: bool = False,
    checkpoints: bool = False,
    in_folder: bool = False,
    yes: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TuneResult:
    """Tune a study, or resume the run of this name, and say what came of it.

    `work` is `train.py:train`, or the words of a command such as ["python", "train.py", "--lr", "{lr}"].
    `deadline` is seconds or a text such as 10m. It trains on this machine, or on a Ray cluster: `on` is
    "local", "ray" or "ray:ADDRESS". Files go to `folder`/`name`, checkpoints also to `store`, a path or URL
    that fsspec knows. `checkpoints` says that a command saves on SIGTERM and goes on from there; else a
    trial that is paused begins anew. `in_folder` has each trial's command run in a folder of its own.
    `progress`, such as print, is called with a line of text for every change on the way. `yes` lets a run
    whose journal is damaged go on from before the damage.

    Ctrl-C or SIGTERM stops it with checkpoints saved, and then raises KeyboardInterrupt; the same call
    goes on with it.
    """
    if at_deadline not in tuple(AtDeadline):
        raise InputError(f"at_deadline is {at_deadline!r}.", remedy=f"It is one of {', '.join(AtDeadline)}.")
    checked = check_request(
        TuneRequest(
            study=given_path(study, "study", "study.toml"),
            work=given_work(work),
            deadline_s=given_deadline_s(deadline),
            deadline_as=deadline_words(deadline),
            budget_usd=given_budget_usd(budget_usd),
            policy=given_text(policy, "policy", "hypersched"),
            options=given_options(options),
            on=given_text(on, "on", LOCAL),
            store=given_text(store, "store", "s3://bucket/runs"),
            slots=None if slots is None else given_whole(slots, "slots"),
            name=None if name is None else given_text(name, "name", "first"),
            runs=given_path(folder, "folder", str(RUNS)),
            seed=given_whole(seed, "seed"),
            at_deadline=AtDeadline(at_deadline),
            retries=given_whole(retries, "retries"),
            tensorboard=given_flag(tensorboard, "tensorboard"),
            checkpoints=given_flag(checkpoints, "checkpoints"),
            in_folder=given_flag(in_folder, "in_folder"),
        )
    )
    return _tuned(checked, given_progress(progress), yes=given_flag(yes, "yes"))


def _tuned(checked: Checked, tell: Callable[[str], None] | None, *, yes: bool) -> TuneResult:
    """What `tune` does once it is known what to do."""
    if (moved := extend(checked)) and tell is not None:
        tell(f"{checked.folder.path}: {moved}.")
    over = finished(checked)
    if over is not None:
        way = what_lets_go_on(checked.folder.begun_spec(), over.ended_by, time.time())
        if way and tell is not None:
            tell(f"{checked.folder.path}: {way}.")
        return over
    if (mended := mend(checked.folder, yes=yes)) and tell is not None:
        tell(mended)
    with holding(checked.folder, local_devices(checked.target)), checked.target.opened() as target:
        if tell is not None:
            for note in target.notes:
                tell(note)
        prepared = prepare(
            checked, on_progress=lambda one: None if tell is None else tell(measuring_line(one))
        )
        with interrupting() as stop, telling(tell, stop=stop, study=checked.outline.study) as observer:
            return start(prepared, stop=stop, observer=observer)


def elsewhere(checked: Checked, result: TuneResult) -> Replayed | None:
    """What another policy would have reached, by a replay; None of a run without a model."""
    if not result.succeeded:
        return None
    other = COMPARED[1] if checked.request.policy == COMPARED[0] else COMPARED[0]
    try:
        end_s = time.monotonic() + COMPARING_S
        compared = replay(checked.folder, [other], stop=lambda: time.monotonic() >= end_s)
        return next(iter(compared.replayed), None)
    except OutOfTimeError:  # the result does not wait for it; `simulate --replay` has the time
        return None
    except InputError:  # what was measured is damaged, as the summary says; the result is not
        return None


def _loading_s(checked: Checked) -> float:
    """How much longer than others the very first start takes, where a probe has seen it.

    Where nodes are launched that is part of their start.
    """
    if checked.outline.profile is not None or not checked.folder.profile.is_file():
        return 0.0
    measured = read_profile(checked.folder.profile)
    return 0.0 if measured.node is not None else measured.loading_s


def _training(prepared: Prepared, target: OpenTarget) -> TrainingSpec:
    request, begun = prepared.checked.request, first_nodes(prepared.checked.folder)
    return TrainingSpec(
        work=lambda _: prepared.checked.work,
        study=prepared.tuning.study,
        slots=max(prepared.offer.slots, target.offer.slots),
        nodes=target.held if begun is None else begun,
        seed=request.seed,
        retries=request.retries,
        tensorboard=request.tensorboard,
        runs_commands=isinstance(prepared.checked.work, CommandLine),
    )


def _score(prepared: Prepared, target: OpenTarget, make: MakeSubstrate, started_at_s: float) -> RealRun:
    tuning, request, outline = prepared.tuning, prepared.checked.request, prepared.checked.outline
    sampler = make_sampler(outline.sampler, outline.space, tuning.study, request.seed)
    slots, budget_usd = prepared.offer.slots, tuning.limits.budget_usd
    meter = CostMeter(tuning.instances, tuning.billing, outline.machine.usd_per_slot_hour)
    training = _training(prepared, target)
    return RealRun(
        folder=prepared.checked.folder,
        policy=as_agreed(
            make_policy(request.policy, options=request.options, tuning=tuning), prepared.expectation
        ),
        make=lambda: make(training, prepared.checked.folder, wall_clock(started_at_s)),
        nodes=training.nodes,
        source=TrialSource(
            tuning.study,
            sampler,
            most_gpus=slots,
            ahead=trials_ahead(tuning.study, sampler, slots),
            elastic=prepared.checked.elastic,
        ),
        seed=request.seed,
        deadline_s=tuning.limits.deadline_s,
        at_deadline=request.at_deadline,
        limit=None
        if budget_usd is None
        else BudgetCap(meter, budget_usd, reserve_s=stopping_s(tuning.profile)),
    )
