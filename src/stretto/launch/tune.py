"""Tuning a study for real.

`check_request` reads the request; `CheckedStudy.opened` opens its target; `StudyLaunch` measures, plans and
then trains there. `stretto.tune` and `stretto tune` both take these steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.units import format_duration
from stretto.driving.drive import NoObserver, Observer, RealRun, drive, wall_clock
from stretto.driving.early_stop import EarlyStop
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.stop import Stop, interrupting
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import LOCAL, OpenTarget
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
    loading_s_of,
    stopping_s,
    until,
    with_own,
)
from stretto.launch.extend import extend, release_leftover_nodes
from stretto.launch.progress import measuring_line, telling
from stretto.planning.tuning import Tuning
from stretto.pricing.instances import Instance, Offer
from stretto.profiling.origin import node_to_launch
from stretto.profiling.probe_data import OnProgress
from stretto.profiling.speeds import Speeds, speeds_of
from stretto.runs.begin import begin, check_room, check_same
from stretto.runs.deadline import AtDeadline, EndedBy, what_lets_go_on
from stretto.runs.folder import RUNS, RunSpec, first_nodes
from stretto.runs.results import TuneResult, best_tables, plan_tables, read_prediction, tune_result
from stretto.runs.status import check_free, read_ending
from stretto.runs.store import check_unclaimed
from stretto.search.samplers import make_sampler
from stretto.search.source import TrialSource, trials_ahead
from stretto.simulation.replay import Replayed, replay
from stretto.simulation.studies import OutOfTimeError
from stretto.system.locks import myself

COMPARED = ("asha", "hypersched")
"""The policy that a run is compared with; the second one if the run's own is the first."""
COMPARING_S = 3.0
"""The longest that this comparison takes: the summary of a run waits for it."""

Tell = Callable[[str], None]


def earlier_result(checked: CheckedStudy, tell: Tell) -> TuneResult | None:
    """The result of the run of this name, if it is over; InputError if it was begun with other settings.

    First the run gets the later deadline or larger budget that is asked for. If its deadline passed while
    it was dead, the nodes that it had launched are released.
    """
    folder = checked.folder
    if moved := extend(checked):
        tell(f"{folder.path}: {moved}.")
    spec = folder.spec()
    if spec is None:
        return None
    check_same(folder, spec, "tune", checked.asked)
    ended_by, deadline_s = read_ending(folder), spec.deadline_s
    if ended_by is None and deadline_s is not None and time.time() - spec.started_at_s >= deadline_s:
        check_free(folder)
        release_leftover_nodes(folder, checked.target, checked.outline.rented, spec.started_at_s)
        ended_by = EndedBy.DEADLINE
    return None if ended_by is None else tune_result(folder, ended_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStudy:
    """A study that was checked, measured and planned, and can be started or resumed."""

    checked: CheckedStudy
    tuning: Tuning
    """Its deadline counts from the first start if there was one, else from `at_s`."""
    offer: Offer
    """The resources when the run was begun, or now."""
    at_s: float
    """When it was prepared, by the monotonic clock."""
    expectation: Expectation
    speeds: str
    """The source of its speeds, in words."""
    resumes: bool

    def now(self) -> PreparedStudy:
        """The same with the deadline counted from now: it did not move while the user read the plan."""
        limits, now_s = self.tuning.limits, time.monotonic()
        if self.resumes or limits.deadline_s is None:
            return self
        waited = f": {format_duration(now_s - self.at_s)} passed between the plan and its start"
        left_s = self.checked.left_s(now_s, waited)
        tuning = dataclasses.replace(self.tuning, limits=dataclasses.replace(limits, deadline_s=left_s))
        return dataclasses.replace(self, tuning=tuning, at_s=now_s)


class StudyLaunch:
    """A study on its open target: `prepare` measures and plans, `start` trains."""

    def __init__(self, checked: CheckedStudy, target: OpenTarget) -> None:
        self._checked = checked
        self._folder = checked.folder
        self._target = target

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the start."""
        return tuple(self._checked.notes(self._target))

    @property
    def node_to_launch(self) -> Instance | None:
        """The node that must be launched and paid to measure on; None: none."""
        return node_to_launch(self._checked, self._target)

    def prepare(self, on_progress: OnProgress = lambda _: None) -> PreparedStudy:
        """Measures what is unknown and predicts the run; no trial is started.

        The deadline counts from when the command was given, so this takes time of it.
        """
        checked = self._checked
        check_room(self._folder.path)
        if checked.request.store:
            check_unclaimed(checked.request.store, self._folder.path)
        spec = self._folder.spec()
        offer = self._target.offer if spec is None or spec.offer is None else spec.offer
        speeds = speeds_of(checked, self._target, offer, on_progress)
        tuning_now = self._tuning_clock(speeds, offer, spec)
        expectation = self._kept_expectation() or self._expect(tuning_now)
        return PreparedStudy(
            checked=checked,
            at_s=time.monotonic(),
            tuning=tuning_now(),
            offer=offer,
            expectation=expectation,
            speeds=speeds.source,
            resumes=self._folder.is_begun,
        )

    def start(
        self, prepared: PreparedStudy, stop: Stop | None = None, observer: Observer | None = None
    ) -> TuneResult:
        """Starts or resumes the run and drives it until it is over or `stop` is asked."""
        prepared, folder = prepared.now(), self._folder
        self._target = self._target.look_again()
        spec = begin(folder, _spec_of(prepared))
        if folder.read("plan") is None:
            folder.write("plan", plan_tables(prepared.expectation))
        early_stop = EarlyStop(folder, prepared.tuning.study, observer or NoObserver())
        ended_by = drive(self._real_run(prepared, spec), stop or Stop(), early_stop)
        if ended_by.is_final:
            folder.write("result", {"ended_by": str(ended_by)})
        result = tune_result(folder, ended_by)
        if ended_by.is_final:
            folder.write("result", {"ended_by": str(ended_by), **best_tables(result)})
        return result

    @property
    def _nodes(self) -> tuple[Node, ...]:
        """The nodes of the run from its first start."""
        begun = first_nodes(self._folder)
        return self._target.held if begun is None else begun

    def _tuning_clock(self, speeds: Speeds, offer: Offer, spec: RunSpec | None) -> Callable[[], Tuning]:
        """Gives the study with the time that is left whenever it is called: planning takes time, too."""
        checked, nodes, measured_s = self._checked, self._nodes, time.monotonic()

        def tuning_now() -> Tuning:
            spent = (
                f": {format_duration(measured_s - checked.request.asked_s)} were spent on measuring "
                f"its speed, {format_duration(time.monotonic() - measured_s)} on planning"
            )
            left_s = checked.left_s(time.monotonic(), spent) if spec is None else spec.deadline_s
            tuning = checked.tuning(speeds.profile, offer, left_s)
            return with_own(tuning, nodes, checked.outline.machine) if checked.rents else tuning

        return tuning_now

    def _kept_expectation(self) -> Expectation | None:
        """What was predicted when the run was begun; None if it has not begun."""
        kept = read_prediction(self._folder)
        if kept is None:
            return None
        return Expectation(finish_s=kept.finish_s, cost_usd=kept.cost_usd, epochs=kept.epochs)

    def _expect(self, tuning_now: Callable[[], Tuning]) -> Expectation:
        checked, tuning, loading_s = self._checked, tuning_now(), loading_s_of(self._checked)
        deadline_s = tuning.limits.deadline_s
        check_pays_an_epoch(tuning, loading_s, rents=checked.rents)
        found = expect(
            checked.outline,
            tuning,
            checked.policy_for(tuning),
            policy_name=checked.request.policy,
            options=checked.request.options,
            seed=checked.request.seed,
            nodes=self._nodes,
            loading_s=loading_s,
            within_s=PLANNING_S if deadline_s is None else min(PLANNING_S, PLANNING_SHARE * deadline_s),
        )
        found = after_loading(found, loading_s, deadline_s)
        limits = tuning_now().limits
        found = until(found, limits.deadline_s, limits.budget_usd)
        return after_measuring(found, checked.measuring_usd)

    def _real_run(self, prepared: PreparedStudy, spec: RunSpec) -> RealRun:
        checked, tuning, folder = self._checked, prepared.tuning, self._folder
        request, outline = checked.request, checked.outline
        sampler = make_sampler(outline.sampler, outline.space, tuning.study, request.seed)
        slots, budget_usd = prepared.offer.slots, tuning.limits.budget_usd
        meter = CostMeter(tuning.instances, tuning.billing, outline.machine.usd_per_slot_hour)
        training = TrainingSpec(
            work=lambda _: checked.work,
            study=tuning.study,
            slots=max(slots, self._target.offer.slots),
            nodes=self._nodes,
            seed=request.seed,
            retries=request.retries,
            tensorboard=request.tensorboard,
            runs_commands=isinstance(checked.work, CommandLine),
        )
        return RealRun(
            folder=folder,
            policy=as_agreed(checked.policy_for(tuning), prepared.expectation),
            make=lambda: self._target.make(training, folder, wall_clock(spec.started_at_s)),
            nodes=training.nodes,
            source=TrialSource(
                tuning.study,
                sampler,
                most_gpus=slots,
                ahead=trials_ahead(tuning.study, sampler, slots),
                elastic=checked.elastic,
            ),
            seed=request.seed,
            deadline_s=tuning.limits.deadline_s,
            at_deadline=request.at_deadline,
            limit=None
            if budget_usd is None
            else BudgetCap(meter, budget_usd, reserve_s=stopping_s(tuning.profile)),
        )


def _spec_of(prepared: PreparedStudy) -> RunSpec:
    checked = prepared.checked
    return RunSpec(
        kind="tune",
        started_at_s=time.time(),
        command=myself().command,
        asked=checked.asked,
        slots=prepared.offer.slots,
        offer=prepared.offer,
        deadline_s=prepared.tuning.limits.deadline_s,
        budget_usd=checked.limits.budget_usd,
        file=str(checked.outline.path.absolute()),
    )


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
    """Tune a study, or resume the run of this name, and return its result.

    `work` is `train.py:train`, or the words of a command such as ["python", "train.py", "--lr", "{lr}"].
    `deadline` is seconds or a text such as 10m. `on` is "local" for this machine, or "ray" or "ray:ADDRESS".
    Files go to `folder`/`name`, checkpoints also to `store`, a path or URL that fsspec knows. `checkpoints`
    says that a command saves on SIGTERM and resumes; otherwise a paused trial starts again from its first
    epoch. With `in_folder` each trial's command runs in a folder of its own. `progress`, such as print, is
    called with a line of text for every change. `yes` resumes a run with a damaged journal from before the
    damage.

    Ctrl-C or SIGTERM saves checkpoints, stops the run and raises KeyboardInterrupt. The same call resumes.
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
    tell = given_progress(progress)
    return _tuned(checked, tell, yes=given_flag(yes, "yes"))


def _tuned(checked: CheckedStudy, progress: Tell | None, *, yes: bool) -> TuneResult:
    tell = progress or (lambda _: None)
    over = earlier_result(checked, tell)
    if over is not None:
        if way := what_lets_go_on(checked.folder.begun_spec(), over.ended_by, time.time()):
            tell(f"{checked.folder.path}: {way}.")
        return over
    with checked.opened(yes=yes, tell=tell) as target:
        launch = StudyLaunch(checked, target)
        for note in launch.notes:
            tell(note)
        prepared = launch.prepare(lambda one: tell(measuring_line(one)))
        with interrupting() as stop, telling(progress, stop=stop, study=checked.outline.study) as observer:
            return launch.start(prepared, stop, observer)


def elsewhere(checked: CheckedStudy, result: TuneResult) -> Replayed | None:
    """What another policy would have reached, by a replay; None for a run without a model."""
    if not result.succeeded:
        return None
    other = COMPARED[1] if checked.request.policy == COMPARED[0] else COMPARED[0]
    try:
        end_s = time.monotonic() + COMPARING_S
        compared = replay(checked.folder, [other], stop=lambda: time.monotonic() >= end_s)
        return next(iter(compared.replayed), None)
    except OutOfTimeError:  # the result does not wait for it; `simulate --replay` has the time
        return None
    except InputError:  # the measurements are damaged, as the summary says; the result is not
        return None
