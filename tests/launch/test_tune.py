"""Tuning for real, with a simulation where the processes would be: begun, stopped, resumed, summed up."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from launching import finished, prepare, start
from stretto.core.errors import InputError
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobReported, RunResumed, RunStarted
from stretto.core.observations import Result
from stretto.driving.drive import NoObserver, RealSubstrate
from stretto.driving.early_stop import EarlyStop
from stretto.driving.local_target import ThisMachine
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.stop import Stop, listening
from stretto.driving.substrate import TrainingSpec
from stretto.journal.rows import read_events
from stretto.launch.expect import corrected
from stretto.launch.tune import PreparedStudy, elsewhere
from stretto.planning.profile import Estimate
from stretto.runs.deadline import AtDeadline, EndedBy
from stretto.runs.explain import cluster_lines
from stretto.runs.folder import RunFolder
from stretto.runs.live_state import LiveState
from stretto.runs.results import TuneResult, checkpoint_at
from stretto.search.study import Direction, Study
from stretto.wire.checkpoints import FORMAT, META_FILE, STATE_FILE, CheckpointMeta, meta_text
from tune_world import STUDY, SimulatedWorkers, simulated, write_study

POLICIES = ("hypersched", "asha", "sha", "hyperband", "random", "rubberband")


def asked(
    here: Path,
    text: str = STUDY,
    *,
    deadline_s: float | None = 400.0,
    policy: str = "asha",
    work: str | tuple[str, ...] = "train.py:train",
    options: Mapping[str, str] | None = None,
    checkpoints: bool = False,
) -> CheckedStudy:
    return check_request(
        TuneRequest(
            study=write_study(here, text),
            work=work,
            policy=policy,
            options=options or {},
            checkpoints=checkpoints,
            deadline_s=deadline_s,
            deadline_as=None if deadline_s is None else f"{deadline_s}",
        )
    )


def tuned(checked: CheckedStudy) -> TuneResult:
    return start(prepare(checked, make=simulated), make=simulated)


def test_a_budget_is_spent_but_for_what_stopping_takes(here: Path) -> None:
    """Two slots at 2 cents a second together: 35 s, of which a start of 2 s is kept, and the last second."""
    text = STUDY.replace("slots = 2", "slots = 2\nusd_per_slot_hour = 36") + "[limits]\nbudget_usd = 0.7\n"
    result = tuned(asked(here, text))
    assert result.ended_by == "budget"
    assert result.finished_s == pytest.approx(32.0)
    assert result.predicted_epochs is not None
    assert result.predicted_epochs.mean == pytest.approx(result.epochs, abs=1)
    assert 0.6 <= result.cost_usd <= 0.7


class Counting(NoObserver):
    """Asks to stop after so many events."""

    def __init__(self, stop: Stop, events: int) -> None:
        self._stop = stop
        self._left = events
        self.seen: list[Event] = []

    def observe(self, event: Event) -> None:
        self.seen.append(event)
        self._left -= 1
        if self._left == 0:
            self._stop.ask()


class Later(SimulatedWorkers):
    """Is there at some time, however long before that the run was stopped."""

    def __init__(self, training: TrainingSpec, *, at_s: float) -> None:
        super().__init__(training)
        self._at_s = at_s
        self._ahead_s = at_s

    def now_s(self) -> float:
        return super().now_s() + self._ahead_s

    def next_event(self, until_s: float) -> Event | None:
        event = super().next_event(until_s - self._ahead_s)
        return None if event is None else dataclasses.replace(event, t_s=event.t_s + self._ahead_s)

    def recover(self, history: Iterable[Event]) -> None:
        self._ahead_s = 0.0
        super().recover(history)
        self._ahead_s = self._at_s - super().now_s()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_comes_to_a_model(here: Path, policy: str) -> None:
    checked = asked(here, policy=policy)
    result = tuned(checked)
    assert result.succeeded
    assert result.best_metric == max(
        trial.best_metric for trial in result.trials if trial.best_metric is not None
    )
    best = next(trial for trial in result.trials if trial.id == result.best_trial)
    assert result.best_config == best.config
    assert result.finished_s <= 400.0
    assert finished(checked) == result


class TestCommandWithoutCheckpoints:
    COMMAND = (sys.executable, "train.py", "{lr}")

    def sizes(self, checked: CheckedStudy) -> set[int]:
        tuned(checked)
        return {
            instruction.allocation.worker_count
            for event in checked.folder.events()
            if isinstance(event, Decided)
            for instruction in event.instructions
        }

    @pytest.mark.parametrize("policy", [*POLICIES, "asha uniform"])
    def test_it_is_never_resized(self, here: Path, policy: str) -> None:
        name, _, share = policy.partition(" ")
        options = {"share": share} if share else {}
        assert self.sizes(asked(here, policy=name, options=options, work=self.COMMAND)) <= {0, 1}

    @pytest.mark.parametrize("in_file", [True, False])
    def test_one_that_keeps_them_is(self, here: Path, in_file: bool) -> None:
        text = STUDY.replace("trials = 6", "trials = 6\ncheckpoints = true") if in_file else STUDY
        checked = asked(here, text, policy="hypersched", work=self.COMMAND, checkpoints=not in_file)
        assert 2 in self.sizes(checked)
        assert list(checked.notes(ThisMachine(slots=2))) == []

    def test_it_is_said_beforehand(self, here: Path) -> None:
        assert "--checkpoints" in next(asked(here, work=self.COMMAND).notes(ThisMachine(slots=2)))

    def test_a_hyperparameter_that_the_command_is_not_told(self, here: Path) -> None:
        text = STUDY.replace("[space]", "[space]\nwidth = { int = [1, 9] }\ndepth = { int = [1, 9] }")
        work = (sys.executable, "train.py", "{lr}", "{{width}}")
        told = next(asked(here, text, work=work).notes(ThisMachine(slots=2)))
        assert "does not have {width}, {depth}: trials do not differ in it" in told

    def test_a_function_always_has_them(self, here: Path) -> None:
        with pytest.raises(InputError, match="always has them"):
            asked(here, checkpoints=True)


def test_a_forecast_is_kept_from_before_the_start(here: Path) -> None:
    prepared = prepare(asked(here, policy="rubberband"), make=simulated)
    result = start(prepared, make=simulated)
    assert prepared.expectation.finish_s is not None
    assert result.predicted_finish_s == prepared.expectation.finish_s
    assert result.predicted_finish_s.mean == pytest.approx(result.finished_s, rel=0.1)


def test_the_plan_that_was_shown_is_the_one_that_is_followed(here: Path) -> None:
    prepared = prepare(asked(here, policy="rubberband", deadline_s=600.0), make=simulated)
    planned = prepared.expectation.planned
    assert planned is not None
    shown = planned.outcome.static
    assert shown is not None
    other = dataclasses.replace(planned, outcome=dataclasses.replace(planned.outcome, chosen=shown))
    expectation = dataclasses.replace(prepared.expectation, planned=other)
    start(dataclasses.replace(prepared, expectation=expectation), make=simulated)
    events = read_events(prepared.checked.folder.journal, with_memory=True)
    decisions = (event for event in events if isinstance(event, Decided))
    memory = next(decision.memory for decision in decisions if decision.memory is not None)
    nodes = [stage["nodes"] for stage in memory["course"]["stages"]]
    assert nodes == [stage.nodes for stage in shown.plan.stages]
    assert nodes != [stage.nodes for stage in planned.outcome.followed(planned.tuning.limits).plan.stages]


@pytest.mark.parametrize("policy", ["hypersched", "rubberband"])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(here: Path, policy: str) -> None:
    whole = tuned(dataclasses.replace(asked(here, policy=policy), folder=RunFolder(here / "runs" / "whole")))
    checked = asked(here, policy=policy)
    for events in (10, 25, 40):
        stop = Stop()
        part = start(
            prepare(checked, make=simulated), stop=stop, observer=Counting(stop, events), make=simulated
        )
        assert part.ended_by == EndedBy.REQUEST
        assert finished(checked) is None
    result = tuned(checked)
    assert (result.best_metric, result.finished_s, result.gpu_hours) == (
        whole.best_metric,
        whole.finished_s,
        whole.gpu_hours,
    )
    assert [trial.epochs for trial in result.trials] == [trial.epochs for trial in whole.trials]


def test_the_deadline_is_that_of_the_first_start(here: Path) -> None:
    checked = asked(here)
    stop = Stop()
    start(prepare(checked, make=simulated), stop=stop, observer=Counting(stop, 10), make=simulated)
    spec = checked.folder.read("spec")
    assert spec is not None
    later = dataclasses.replace(checked, limits=dataclasses.replace(checked.limits, deadline_s=470.0))
    assert prepare(later, make=simulated).tuning.limits.deadline_s == spec["deadline_s"]


def earlier(prepared: PreparedStudy, by_s: float) -> PreparedStudy:
    """As if it had been asked for then."""
    request = dataclasses.replace(prepared.checked.request, asked_s=prepared.checked.request.asked_s - by_s)
    checked = dataclasses.replace(prepared.checked, request=request)
    return dataclasses.replace(prepared, checked=checked)


class TestDeliberation:
    """Time between the plan and the start."""

    def test_it_does_not_move_the_deadline(self, here: Path) -> None:
        checked = asked(here)
        prepared = prepare(checked, make=simulated)
        start(earlier(prepared, 100.0), make=simulated)
        spec = checked.folder.read("spec")
        assert spec is not None
        assert prepared.tuning.limits.deadline_s is not None
        assert spec["deadline_s"] <= prepared.tuning.limits.deadline_s - 100.0

    def test_the_deadline_may_pass_meanwhile(self, here: Path) -> None:
        checked = asked(here)
        prepared = prepare(checked, make=simulated)
        with pytest.raises(InputError, match="passed before a trial was started"):
            start(earlier(prepared, 400.0), make=simulated)
        assert checked.folder.read("spec") is None


def test_a_deadline_that_passed_while_nothing_ran_ends_the_run(here: Path) -> None:
    checked = asked(here)
    stop = Stop()
    start(prepare(checked, make=simulated), stop=stop, observer=Counting(stop, 10), make=simulated)
    spec = checked.folder.read("spec")
    assert spec is not None
    checked.folder.write("spec", {**spec, "started_at_s": time.time() - 401.0})
    over = finished(checked)
    assert over is not None
    assert over.ended_by == EndedBy.DEADLINE
    assert over.finished_s == spec["deadline_s"]


def test_trials_are_cut_off_at_the_deadline(here: Path) -> None:
    result = tuned(asked(here, deadline_s=39.0))
    assert result.ended_by == EndedBy.DEADLINE
    assert result.trials_by_state["cut off"] == 2
    assert all(trial.epochs <= 4 for trial in result.trials)


@pytest.mark.parametrize("how", AtDeadline)
def test_trials_may_finish_their_epoch(here: Path, how: AtDeadline) -> None:
    made: list[SimulatedWorkers] = []

    def make(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        del folder, clock
        made.append(SimulatedWorkers(training))
        return made[-1]

    checked = asked(here, deadline_s=39.0)
    checked = dataclasses.replace(checked, request=dataclasses.replace(checked.request, at_deadline=how))
    start(prepare(checked, make=simulated), make=make)
    assert made[0].finishing == (how is AtDeadline.FINISH_EPOCH)


class TestBudget:
    TEXT = STUDY.replace("slots = 2", "slots = 2\nusd_per_slot_hour = 1")

    def test_it_is_never_exceeded(self, here: Path) -> None:
        checked = asked(here, self.TEXT, deadline_s=None)
        budget_usd = 2 * 100 / 3600
        limits = dataclasses.replace(checked.limits, budget_usd=budget_usd)
        result = tuned(dataclasses.replace(checked, limits=limits))
        assert result.ended_by == EndedBy.BUDGET
        assert 0.5 * budget_usd < result.cost_usd < budget_usd

    def test_downtime_costs_nothing(self, here: Path) -> None:
        budget_usd = 2 * 100 / 3600
        checked = asked(here, self.TEXT, deadline_s=None)
        checked = dataclasses.replace(
            checked, limits=dataclasses.replace(checked.limits, budget_usd=budget_usd)
        )
        stop = Stop()
        part = start(prepare(checked, make=simulated), stop=stop, observer=Counting(stop, 12), make=simulated)
        assert 0.0 < part.cost_usd < budget_usd / 2
        last_s = max(event.t_s for event in checked.folder.events())

        def later(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
            del folder, clock
            return Later(training, at_s=last_s + 1000.0)

        result = start(prepare(checked, make=simulated), make=later)
        (resumed,) = (event for event in checked.folder.events() if isinstance(event, RunResumed))
        assert 900.0 < resumed.down_s <= 1000.0
        told = [line.what for line in cluster_lines(checked.folder.events()) if line.subject == "run"]
        assert told == ["stopped", "resumed"]
        assert result.ended_by == EndedBy.BUDGET
        assert 0.5 * budget_usd < result.cost_usd < budget_usd
        assert result.finished_s > 1000.0
        assert result.gpu_hours <= 2 * (result.finished_s - resumed.down_s) / 3600

    def test_without_one_the_machine_is_paid_for_to_the_end(self, here: Path) -> None:
        result = tuned(asked(here, self.TEXT))
        assert result.cost_usd == pytest.approx(2 * result.finished_s / 3600, rel=0.02)

    def test_a_policy_that_rents_pays_for_what_it_holds(self, here: Path) -> None:
        result = tuned(asked(here, self.TEXT, policy="rubberband", deadline_s=600.0))
        assert 0 < result.cost_usd < 2 * result.finished_s / 3600


def test_a_checkpoint_that_was_put_aside_is_not_named(tmp_path: Path) -> None:
    """A worker that finds it damaged does so, and may be stopped before it has saved another."""
    best, newest = tmp_path / "00000001" / STATE_FILE, tmp_path / "00000002" / STATE_FILE
    for file in (best, newest):
        file.parent.mkdir()
        file.touch()
    assert checkpoint_at(str(best), str(newest)) == best
    best.parent.rename(best.parent.with_suffix(".corrupt"))
    assert checkpoint_at(str(best), str(newest)) == newest
    newest.parent.rename(newest.parent.with_suffix(".corrupt"))
    assert checkpoint_at(str(best), str(newest)) is None
    assert checkpoint_at("", "s3://bucket/00000001") == "s3://bucket/00000001"


def test_the_best_checkpoint_is_the_one_on_the_disk_though_nobody_lived_to_tell(here: Path) -> None:
    checked = asked(here)
    best = tuned(checked).best_trial
    assert best is not None
    for number, is_best in ((4, True), (7, True), (8, False)):
        folder = checked.folder.checkpoints(best) / f"{number:08d}"
        folder.mkdir(parents=True)
        meta = CheckpointMeta(
            format=FORMAT, progress=float(number), best=is_best, size_bytes=0, sha256=64 * "0"
        )
        (folder / META_FILE).write_text(meta_text(meta))
        (folder / STATE_FILE).touch()
    result = finished(checked)
    assert result is not None
    assert result.checkpoint == (checked.folder.checkpoints(best) / "00000007" / STATE_FILE).absolute()
    (shown,) = [trial.checkpoint for trial in result.trials if trial.id == best]
    assert shown == result.checkpoint
    for number in (4, 7):
        folder = checked.folder.checkpoints(best) / f"{number:08d}"
        folder.rename(folder.with_suffix(".corrupt"))
    result = finished(checked)
    assert result is not None
    assert result.checkpoint == (checked.folder.checkpoints(best) / "00000008" / STATE_FILE).absolute()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("trials = 6", "trials = 7", "study.study.trials was 6 and is 7"),
        ("lr = { log = [1e-4, 1.0] }", "lr = { log = [1e-3, 1.0] }", "study.space.lr.log"),
        ("slots = 2", "slots = 3", "slots was 2 and is 3"),
    ],
)
def test_a_changed_study_is_refused_with_the_difference(here: Path, old: str, new: str, told: str) -> None:
    tuned(asked(here))
    with pytest.raises(InputError, match=r"begun with other settings") as refused:
        finished(asked(here, STUDY.replace(old, new)))
    assert told in str(refused.value)


def test_comments_may_change(here: Path) -> None:
    result = tuned(asked(here))
    assert finished(asked(here, STUDY + "\n# a thought\n")) == result


def test_how_nodes_are_launched_may_be_mended(here: Path) -> None:
    instance = '[[cluster.instance]]\nname = "box"\ngpus = 2\nusd_per_hour = 1.0\n'
    text = STUDY + f'[cluster]\nmax_nodes = 2\n{instance}[ray]\nlaunch = "up {{name}} {{instance}}"\n'
    result = tuned(asked(here, text))
    assert finished(asked(here, text.replace('"up ', '"ssh up '))) == result


def test_another_policy_is_compared_by_a_replay(here: Path) -> None:
    checked = asked(here, policy="rubberband")
    other = elsewhere(checked, tuned(checked))
    assert other is not None
    assert other.result.policy == "asha"
    assert other.result.best_metric is not None


class TestMetricGuard:
    STUDY = Study(
        name="s", metric="accuracy", direction=Direction.MAX, trials=4, rungs=(2, 4), eta=2, max_epochs=8
    )

    def guard(self, folder: Path, lines: str = "", *, begun: bool = True) -> EarlyStop:
        (folder / "jobs" / "t").mkdir(parents=True)
        (folder / "jobs" / "t" / "metrics.jsonl").write_text(lines)
        guard = EarlyStop(RunFolder(folder), self.STUDY, NoObserver())
        if begun:
            guard.tick(0.0)
        return guard

    def report(self, epoch: int, *values: float | None) -> JobReported:
        results = tuple(Result(epoch, value, None, 1, 1) for value in values)
        return JobReported(t_s=1.0, job_id="t", work_done=epoch, epoch=epoch, results=results)

    def ended(self, guard: EarlyStop, event: Event) -> str:
        guard.observe(event)
        with pytest.raises(InputError) as ended:
            guard.tick(2.0)
        return str(ended.value)

    def test_a_metric_of_another_name_ends_the_run_at_the_first_report(self, tmp_path: Path) -> None:
        guard = self.guard(tmp_path, '{"epoch": 1, "acc": 0.5, "loss": 2.5}\n')
        told = self.ended(guard, self.report(1))
        assert "'accuracy' is never reported; what is reported is acc, loss." in told
        assert "run.report(accuracy=...)" in told

    def test_code_that_reports_nothing_has_until_the_first_comparison(self, tmp_path: Path) -> None:
        guard = self.guard(tmp_path)
        guard.observe(self.report(1))
        guard.tick(1.0)
        assert "never reported; nothing is" in self.ended(guard, self.report(2))

    def test_a_command_has_until_its_next_epoch(self, tmp_path: Path) -> None:
        guard = self.guard(tmp_path, '{"epoch": 1, "acc": 0.5}\n')
        guard.observe(self.report(0))
        guard.tick(1.0)
        with (tmp_path / "jobs" / "t" / "metrics.jsonl").open("a") as file:
            file.write('{"epoch": 2, "acc": 0.5}\n')
        assert "what is reported is acc" in self.ended(guard, self.report(0))

    def test_a_trial_that_came_to_its_end_without_ends_the_run(self, tmp_path: Path) -> None:
        guard = self.guard(tmp_path)
        (tmp_path / "jobs" / "t" / "stdout.log").write_text('hello\n{"acc": 0.5}\n')
        told = self.ended(guard, JobFinished(t_s=1.0, job_id="t"))
        assert "what is reported is acc" in told

    @pytest.mark.parametrize(
        "lines",
        [
            '{"epoch": 1, "accuracy": null}\n',
            '{"epoch": 1, "loss": 2.5}\n{"epoch": 2, "accuracy": 0.5}\n{"epo',
        ],
        ids=["not a number", "not in the first line"],
    )
    def test_one_that_is_reported_at_all_is_enough(self, tmp_path: Path, lines: str) -> None:
        guard = self.guard(tmp_path, lines)
        for epoch in range(1, 9):
            guard.observe(self.report(epoch))
        guard.observe(JobFinished(t_s=1.0, job_id="t"))
        guard.tick(1.0)

    def failed(self, job_id: str, error: str) -> JobFailed:
        log = f"jobs/{job_id}/stdout.log"
        return JobFailed(t_s=1.0, job_id=job_id, error=f"Traceback\n{error}\n", log=log)

    def test_code_that_fails_alike_in_every_trial_is_not_tried_for_ever(self, tmp_path: Path) -> None:
        guard = self.guard(tmp_path)
        for job_id in "ab":
            guard.observe(self.failed(job_id, "KeyError: 'lr'"))
            guard.tick(1.0)
        told = self.ended(guard, self.failed("c", "KeyError: 'lr'"))
        assert "the first 3 trials failed in the same way" in told
        assert "KeyError: 'lr'" in told
        assert "jobs/c/stdout.log" in told

    def test_what_was_wrong_before_a_run_is_resumed_may_have_been_mended(self, tmp_path: Path) -> None:
        guard = self.guard(tmp_path, '{"epoch": 1, "acc": 0.5}\n', begun=False)
        guard.observe(self.report(1))
        for job_id in "abc":
            guard.observe(self.failed(job_id, "KeyError: 'lr'"))
        guard.tick(1.0)
        guard.observe(self.report(2, 0.5))
        guard.tick(2.0)

    @pytest.mark.parametrize("shown", [True, False])
    def test_trials_that_fail_each_in_its_way_or_after_others_go_on(
        self, tmp_path: Path, shown: bool
    ) -> None:
        guard = self.guard(tmp_path)
        if shown:
            guard.observe(self.report(1, 0.5))
        for number in range(5):
            guard.observe(self.failed(str(number), "KeyError" if shown else f"KeyError: {number}"))
        guard.tick(1.0)

    @pytest.mark.parametrize("value", [0.5, None])
    def test_a_result_is_enough(self, tmp_path: Path, value: float | None) -> None:
        guard = self.guard(tmp_path, '{"epoch": 1, "loss": 2.5}\n')
        guard.observe(self.report(1, value))
        guard.observe(self.report(8))
        guard.tick(1.0)


def test_a_second_signal_ends_everything_at_once(here: Path) -> None:
    stop = Stop()
    made: list[SimulatedWorkers] = []

    def make(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        del folder, clock
        made.append(SimulatedWorkers(training))
        return made[-1]

    class Twice(NoObserver):
        def observe(self, event: Event) -> None:
            if isinstance(event, JobReported):
                stop.on_signal(2, None)
                stop.on_signal(2, None)

    checked = asked(here)
    with pytest.raises(KeyboardInterrupt):
        start(prepare(checked, make=simulated), stop=stop, observer=Twice(), make=make)
    assert made[0].killed == 1
    assert tuned(checked).succeeded


def test_the_board_follows_a_run(here: Path) -> None:
    checked = asked(here)
    result = tuned(checked)
    board = LiveState(checked.outline.study)
    for event in checked.folder.events():
        board.observe(event)
    assert {line.job.id: str(line.phase) for line in board.jobs.values()} == {
        trial.id: trial.state for trial in result.trials
    }
    assert isinstance(next(checked.folder.events()), RunStarted)


def test_a_forecast_is_corrected_while_the_run_goes_on() -> None:
    forecast = Estimate(100.0, 80.0, 120.0)
    assert corrected(forecast, 50.0, 2.0, None) == Estimate(150.0, 110.0, 190.0)
    assert corrected(forecast, 50.0, 2.0, 130.0) == Estimate(130.0, 110.0, 130.0)
    assert corrected(forecast, 90.0, 0.5, 120.0) == Estimate(95.0, 90.0, 120.0)
    assert corrected(forecast, 200.0, 1.0, None) == Estimate(200.0, 200.0, 200.0)


def test_signals_that_are_ignored_stay_ignored() -> None:
    stop = Stop()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(stop):
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
            signal.raise_signal(signal.SIGTERM)
            assert stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_full_disk_is_told_before_anything_is_measured(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = asked(here)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(InputError, match=r"runs/tiny: .*; 10 bytes are free there"):
        prepare(checked, make=lambda *_: pytest.fail("nothing is started"))


def test_the_summary_does_not_wait_for_a_long_comparison(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = asked(here)
    result = start(prepare(checked, make=simulated), make=simulated)
    assert elsewhere(checked, result) is not None
    monkeypatch.setattr("stretto.launch.tune.COMPARING_S", 0.0)
    assert elsewhere(checked, result) is None
