"""Tuning for real, with a simulation where the processes would be: begun, stopped, resumed, summed up."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.app.real_board import Board
from stretto.app.real_drive import AtDeadline, EndedBy, RealSubstrate, Unwatched
from stretto.app.real_expect import corrected
from stretto.app.real_request import Checked, TuneRequest, check_request
from stretto.app.real_result import TuneResult
from stretto.app.real_stop import Stop, listening
from stretto.app.real_substrate import Hands
from stretto.app.run_folder import RunFolder
from stretto.app.tune import MetricGuard, elsewhere, finished, prepare, start
from stretto.core.errors import InputError
from stretto.core.events import Event, JobReported, RunStarted
from stretto.core.observations import Result
from stretto.planning.forecast import Estimate
from tune_world import STUDY, SimulatedHands, simulated, write_study

POLICIES = ("hypersched", "asha", "sha", "hyperband", "random", "rubberband")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(
    here: Path, text: str = STUDY, *, deadline_s: float | None = 400.0, policy: str = "asha"
) -> Checked:
    return check_request(
        TuneRequest(
            study=write_study(here, text),
            work="train.py:train",
            policy=policy,
            deadline_s=deadline_s,
            deadline_as=None if deadline_s is None else f"{deadline_s}",
        )
    )


def tuned(checked: Checked) -> TuneResult:
    return start(prepare(checked, make=simulated), make=simulated)


class Counting(Unwatched):
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


def test_a_forecast_is_kept_from_before_the_start(here: Path) -> None:
    prepared = prepare(asked(here, policy="rubberband"), make=simulated)
    result = start(prepared, make=simulated)
    assert prepared.expectation.finish_s is not None
    assert result.predicted_finish_s == prepared.expectation.finish_s
    assert result.predicted_finish_s.mean == pytest.approx(result.finished_s, rel=0.1)


def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(here: Path) -> None:
    whole = tuned(dataclasses.replace(asked(here), folder=RunFolder(here / "runs" / "whole")))
    checked = asked(here)
    for events in (10, 25, 40):
        stop = Stop()
        part = start(
            prepare(checked, make=simulated), stop=stop, watcher=Counting(stop, events), make=simulated
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
    start(prepare(checked, make=simulated), stop=stop, watcher=Counting(stop, 10), make=simulated)
    spec = checked.folder.read("spec")
    assert spec is not None
    later = dataclasses.replace(checked, limits=dataclasses.replace(checked.limits, deadline_s=470.0))
    assert prepare(later, make=simulated).tuning.limits.deadline_s == spec["deadline_s"]


def test_a_deadline_that_passed_while_nothing_ran_ends_the_run(here: Path) -> None:
    checked = asked(here)
    stop = Stop()
    start(prepare(checked, make=simulated), stop=stop, watcher=Counting(stop, 10), make=simulated)
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
    made: list[SimulatedHands] = []

    def make(hands: Hands, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        del folder, clock
        made.append(SimulatedHands(hands))
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

    def test_without_one_the_machine_is_paid_for_to_the_end(self, here: Path) -> None:
        result = tuned(asked(here, self.TEXT))
        assert result.cost_usd == pytest.approx(2 * result.finished_s / 3600, rel=0.02)

    def test_a_policy_that_rents_pays_for_what_it_holds(self, here: Path) -> None:
        result = tuned(asked(here, self.TEXT, policy="rubberband", deadline_s=600.0))
        assert 0 < result.cost_usd < 2 * result.finished_s / 3600


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
    with pytest.raises(InputError, match=r"begun otherwise") as refused:
        finished(asked(here, STUDY.replace(old, new)))
    assert told in str(refused.value)


def test_comments_may_change(here: Path) -> None:
    result = tuned(asked(here))
    assert finished(asked(here, STUDY + "\n# a thought\n")) == result


def test_another_policy_is_compared_by_a_replay(here: Path) -> None:
    checked = asked(here, policy="rubberband")
    other = elsewhere(checked, tuned(checked))
    assert other is not None
    assert other.result.policy == "asha"
    assert other.result.best_metric is not None


class TestMetricGuard:
    REPORT = JobReported(t_s=1.0, job_id="t", work_done=1.0, epoch=1, results=(Result(1, None, None, 1, 1),))

    def write(self, folder: Path, line: str) -> RunFolder:
        (folder / "jobs" / "t").mkdir(parents=True)
        (folder / "jobs" / "t" / "metrics.jsonl").write_text(line)
        return RunFolder(folder)

    def test_a_metric_that_is_never_reported_ends_the_run(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path, '{"epoch": 1, "acc": 0.5}\n')
        with pytest.raises(InputError, match="'accuracy' is never reported; what is reported is acc"):
            MetricGuard(folder, "accuracy", Unwatched()).observe(self.REPORT)

    def test_one_that_is_not_a_number_is_the_trial_s_own_affair(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path, '{"epoch": 1, "accuracy": null}\n')
        MetricGuard(folder, "accuracy", Unwatched()).observe(self.REPORT)


def test_a_second_signal_ends_everything_at_once(here: Path) -> None:
    stop = Stop()
    made: list[SimulatedHands] = []

    def make(hands: Hands, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        del folder, clock
        made.append(SimulatedHands(hands))
        return made[-1]

    class Twice(Unwatched):
        def observe(self, event: Event) -> None:
            if isinstance(event, JobReported):
                stop.on_signal(2, None)
                stop.on_signal(2, None)

    checked = asked(here)
    with pytest.raises(KeyboardInterrupt):
        start(prepare(checked, make=simulated), stop=stop, watcher=Twice(), make=make)
    assert made[0].killed == 1
    assert tuned(checked).succeeded


def test_the_board_follows_a_run(here: Path) -> None:
    checked = asked(here)
    result = tuned(checked)
    board = Board(checked.outline.study)
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
