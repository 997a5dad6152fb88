"""Replays: a run in the world of what it showed, under its own policy and under others."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_job
from stretto.core.cluster import gpu_nodes
from stretto.core.events import Event, JobFailed, JobReported, NodeAdded
from stretto.core.observations import Result
from stretto.core.seeds import child_rng
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.journal.base import MemoryJournal
from stretto.journal.folds.history import JobHistory
from stretto.journal.sqlite import SqliteJournal
from stretto.planning.profile import Scaling
from stretto.report.run_text import compared_text, replayed_json
from stretto.search.study import Direction
from stretto.simulation.jobs import Setup, simulate
from stretto.simulation.replay import Extrapolated, Replayed, Times, record_of, replay_study
from stretto.simulation.replay_jobs import recorded_workload, replay_jobs
from stretto.simulation.studies import StudyRun
from stretto.worlds.replay import RecordedCurves, RecordedTrial, ValueSource, by_epoch, extended
from stretto.worlds.synthetic import demo_workload
from stretto.worlds.truth import make_workload
from study_command import StudyCommand
from study_inputs import NO_LIMITS, SMALL_STUDY, TWICE_AS_SLOW, edited, run, study_file

POLICIES = ("asha", "hypersched", "rubberband", "sha", "random")
TIGHT = edited(SMALL_STUDY, ('deadline = "40m"', 'deadline = "8m"'))
TEXTS = {"usual": SMALL_STUDY, "tight": TIGHT, "slow": TWICE_AS_SLOW}
SEED = 3
DEMO = demo_workload()
FEW_JOBS = make_workload("few", [(job, DEMO.truth_of(job)) for job in DEMO.jobs[:5]])


def recorded(policy: str, text: str) -> tuple[StudyRun, list[Event]]:
    journal = MemoryJournal()
    done = run(policy, text, seed=SEED, journal=journal)
    return done, list(journal.events())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_under_its_own_policy_comes_out_as_it_was(policy: str, text: str) -> None:
    done, events = recorded(policy, TEXTS[text])
    (again,) = replay_study(study_file(TEXTS[text]), events, [policy], seed=SEED)
    assert again.result.best_metric == pytest.approx(done.result.best_metric, rel=0.01)
    assert again.result.finished_s == pytest.approx(done.result.finished_s, rel=0.06)
    assert again.result.cost_usd == pytest.approx(done.result.cost_usd, rel=0.06)
    assert again.shares[ValueSource.RECORDED] > 0.9


@pytest.mark.parametrize(
    ("shown", "values"),
    [
        ((), ()),
        (((1, 0.5), (2, 0.6)), (0.5, 0.6)),
        (((3, 0.3), (5, 0.5)), (0.3, 0.3, 0.3, 0.4, 0.5)),
        (((2, 0.2), (4, None)), (0.2, 0.2, 0.2, None)),
        (((2, None),), (None, None)),
    ],
)
def test_values_lie_at_their_epochs(
    shown: tuple[tuple[int, float | None], ...], values: tuple[float | None, ...]
) -> None:
    assert by_epoch(shown) == pytest.approx(values)


def test_a_trial_that_is_evaluated_now_and_then_is_as_long_as_it_was() -> None:
    _, events = recorded("random", SMALL_STUDY)
    sparse = [
        replace(event, results=tuple(one for one in event.results if one.epoch % 2 == 0))
        if isinstance(event, JobReported)
        else event
        for event in events
    ]
    file = study_file(SMALL_STUDY)
    whole, half = (record_of(file, some, SEED).curves.trials for some in (events, sparse))
    for row, trial in half.items():
        assert len(trial.values) >= len(whole[row].values) - 1
        assert trial.values[1::2] == pytest.approx(whole[row].values[1 : len(trial.values) : 2])


def test_what_was_not_recorded_is_counted() -> None:
    _, events = recorded("sha", TIGHT)
    random, hypersched = replay_study(study_file(NO_LIMITS), events, ["random", "hypersched"], seed=SEED)
    for one in (random, hypersched):
        assert sum(one.shares.values()) == pytest.approx(1.0)
    assert random.shares[ValueSource.EXTRAPOLATED] > 0.3, "random trains every trial to the end"


def test_trials_that_never_started_are_drawn_from_those_that_did() -> None:
    done, events = recorded("rubberband", edited(TIGHT, ("trials = 8", "trials = 40")))
    started = done.result.trials_started
    file = study_file(edited(NO_LIMITS, ("trials = 8", "trials = 80")))
    (again,) = replay_study(file, events, ["random"], seed=SEED)
    assert again.result.trials_started == 80 > started
    assert again.shares[ValueSource.DRAWN] > 0.3


def test_a_run_that_showed_nothing_is_not_replayed() -> None:
    _, events = recorded("asha", SMALL_STUDY)
    silent = [event for event in events if not isinstance(event, JobReported)]
    assert replay_study(study_file(SMALL_STUDY), silent, ["asha"], seed=SEED) == ()


def test_true_speeds_are_those_that_were_timed() -> None:
    _, events = recorded("hypersched", TWICE_AS_SLOW)
    profile = record_of(study_file(TWICE_AS_SLOW), events, SEED).profile
    assert profile.latency.epoch_s == pytest.approx(70.0, rel=0.15), "35 s were believed"
    assert profile.start_s == 60.0
    speeds = dict(profile.scaling.points)
    assert speeds[2] == pytest.approx(1.87, rel=0.1)
    assert speeds[8] == pytest.approx(5.6, rel=0.15)


def test_loading_the_training_code_counts_once() -> None:
    done, events = recorded("asha", NO_LIMITS)
    first = next(n for n, event in enumerate(events) if isinstance(event, JobReported) and event.resize_s)
    slow = events[first]
    assert isinstance(slow, JobReported)
    assert slow.resize_s is not None
    events[first] = replace(slow, resize_s=slow.resize_s + 100.0)
    assert record_of(study_file(NO_LIMITS), events, SEED).loading_s == pytest.approx(100.0)
    (again,) = replay_study(study_file(NO_LIMITS), events, ["asha"], seed=SEED)
    assert again.result.finished_s == pytest.approx(done.result.finished_s + 100.0, rel=0.06)


def test_loading_costs_who_rents_nothing() -> None:
    _, events = recorded("rubberband", NO_LIMITS)
    first = next(n for n, event in enumerate(events) if isinstance(event, JobReported) and event.resize_s)
    slow = events[first]
    assert isinstance(slow, JobReported)
    assert slow.resize_s is not None
    later = [*events]
    later[first] = replace(slow, resize_s=slow.resize_s + 100.0)
    usual, loaded = (
        replay_study(study_file(NO_LIMITS), some, ["rubberband"], seed=SEED)[0].result
        for some in (events, later)
    )
    assert loaded.finished_s == pytest.approx(usual.finished_s + 100.0, rel=0.06)
    assert loaded.cost_usd == pytest.approx(usual.cost_usd, rel=0.03)


def at_once(events: list[Event]) -> list[Event]:
    """The same run, where nobody saw how long nodes took."""
    return [
        replace(event, queue_s=0.0, init_s=0.0) if isinstance(event, NodeAdded) else event for event in events
    ]


def test_who_does_not_rent_waits_for_nodes_as_the_run_did_and_pays_for_their_start() -> None:
    _, events = recorded("rubberband", NO_LIMITS)
    file = study_file(NO_LIMITS)
    delays = record_of(file, events, SEED).delays
    assert delays is not None
    came = [event for event in events if isinstance(event, NodeAdded)]
    assert delays.init_s.mean == pytest.approx(np.mean([event.init_s for event in came]))
    assert delays.queue_s.mean > 0.0
    (there,) = replay_study(file, at_once(events), ["asha"], seed=SEED)
    (rented,) = replay_study(file, events, ["asha"], seed=SEED)
    wait_s = delays.queue_s.mean + delays.init_s.mean
    usd_per_s = file.fixed_nodes * file.tuning.instances[0].usd_per_hour / 3600.0
    assert rented.result.best_metric == there.result.best_metric
    assert rented.result.finished_s == pytest.approx(there.result.finished_s + wait_s)
    assert rented.result.cost_usd == pytest.approx(there.result.cost_usd + usd_per_s * delays.init_s.mean)


def test_waiting_for_nodes_is_within_the_limits() -> None:
    _, events = recorded("rubberband", TIGHT)
    file = study_file(TIGHT)
    (random,) = replay_study(file, events, ["random"], seed=SEED)
    assert (random.result.ended_by, random.result.finished_s) == ("deadline", file.tuning.limits.deadline_s)
    few = study_file(edited(NO_LIMITS, ("[limits]", "[limits]\nbudget_usd = 1")))
    (random,) = replay_study(few, events, ["random"], seed=SEED)
    assert random.result.ended_by == "budget"
    assert random.result.cost_usd <= 1.0


def test_who_rents_waits_as_long_as_was_seen() -> None:
    _, events = recorded("rubberband", NO_LIMITS)
    slow = [
        replace(event, init_s=event.init_s + 300.0) if isinstance(event, NodeAdded) else event
        for event in events
    ]
    usual, later = (record_of(study_file(NO_LIMITS), some, SEED).profile for some in (events, slow))
    assert later.init_s.mean == pytest.approx(usual.init_s.mean + 300.0)
    finished_s = [
        replay_study(study_file(NO_LIMITS), some, ["rubberband"], seed=SEED)[0].result.finished_s
        for some in (events, slow)
    ]
    assert finished_s[1] > finished_s[0] + 250.0


def test_nodes_that_were_there_are_not_waited_for() -> None:
    _, events = recorded("asha", NO_LIMITS)
    assert record_of(study_file(NO_LIMITS), events, SEED).delays is None


def test_a_trial_that_failed_has_no_number_from_there_on() -> None:
    _, events = recorded("asha", NO_LIMITS)
    last = max(event.t_s for event in events if isinstance(event, JobReported))
    events.append(JobFailed(t_s=last, job_id="trial-000", error="out of memory"))
    assert record_of(study_file(NO_LIMITS), events, SEED).curves.trials[0].values[-1] is None


def shown_in(events: list[Event]) -> set[float | None]:
    return {one.value for event in events if isinstance(event, JobReported) for one in event.results}


@pytest.mark.parametrize("policy", ["random", "hypersched", "asha"])
@pytest.mark.parametrize("direction", list(Direction))
def test_the_best_of_a_replay_was_really_shown(policy: str, direction: Direction) -> None:
    """Trials stopped early are trained on by others, and then come only to a range."""
    _, events = recorded("sha", TIGHT)
    file = study_file(edited(NO_LIMITS, ('direction = "max"', f'direction = "{direction}"')))
    study = file.tuning.study
    (again,) = replay_study(file, events, [policy], seed=SEED)
    best, extrapolated = again.result.best_metric, again.extrapolated
    assert best in shown_in(events)
    assert best is not None
    if extrapolated is not None:
        ends = (extrapolated.low, extrapolated.high)
        assert ends == tuple(sorted(ends))
        assert best == min(ends, key=study.score)
        assert again.shares[ValueSource.RECORDED] < 1.0
    if policy == "random" and direction is Direction.MAX:
        assert extrapolated is not None, "it trains every trial to the end"


def saturating(epochs: int, time: float) -> list[float]:
    return [0.35 * (1.0 - math.exp(-epoch / time)) for epoch in range(1, epochs + 1)]


@pytest.mark.parametrize("time", [1.0, 2.0, 4.0])
def test_a_metric_that_has_saturated_stays_there(time: float) -> None:
    assert max(extended(saturating(14, time), 60, Direction.MAX, 1.0)) == pytest.approx(0.35, abs=0.004)
    losses = [1.0 - value for value in saturating(14, time)]
    assert min(extended(losses, 60, Direction.MIN, 0.0)) == pytest.approx(0.65, abs=0.004)


def curves_of(*trials: RecordedTrial, direction: Direction = Direction.MAX) -> RecordedCurves:
    rows = tuple((("row", row),) for row in range(len(trials) + 1))
    known = dict(enumerate(trials))
    return RecordedCurves(name="it", metric="m", direction=direction, configs=rows, trials=known)


@given(st.integers(6, 20), st.floats(0.5, 6.0), st.booleans())
def test_the_range_holds_what_a_curve_comes_to(known: int, time: float, falling: bool) -> None:
    direction = Direction.MIN if falling else Direction.MAX
    truth = [1.0 - value if falling else value for value in saturating(60, time)]
    curves = curves_of(RecordedTrial(tuple(truth[:known]), 1.0), direction=direction)
    config = curves.configs[0]
    assert curves.best_shown(config, 60) == truth[known - 1]
    found = curves.best_range(config, 60)
    assert found is not None
    low, high = sorted(found)
    assert low - 1e-9 <= truth[-1] <= high + 0.01
    assert curves.best_range(config, known) == (truth[known - 1], truth[known - 1])


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.integers(1, 60))
def test_a_range_begins_with_what_was_shown_and_stays_possible(seen: list[float], epochs: int) -> None:
    for direction, best in ((Direction.MAX, max), (Direction.MIN, min)):
        curves = curves_of(RecordedTrial(tuple(seen), 1.0), direction=direction)
        found = curves.best_range(curves.configs[0], epochs)
        assert found is not None
        assert found[0] == curves.best_shown(curves.configs[0], epochs) == best(seen[:epochs])
        assert best(found) == found[1]
        assert 0.0 <= found[1] <= 1.0


def test_ranges_of_trials_that_show_little() -> None:
    one, diverged = RecordedTrial((0.2,), 1.0), RecordedTrial((0.9, None), 1.0)
    failed = RecordedTrial((0.3, 0.4, None), 1.0, failed=True)
    curves = curves_of(one, diverged, failed)
    of_one, of_diverged, of_failed, of_nobody = (curves.best_range(config, 8) for config in curves.configs)
    assert of_one == (0.2, 0.4), "as far as others went"
    assert of_diverged is None
    assert of_failed == (0.4, 0.4), "it goes no further"
    assert of_nobody == (0.2, 0.4)
    assert [curves.best_shown(config, 8) for config in curves.configs] == [0.2, None, 0.4, None]
    assert curves.best_shown(curves.configs[1], 1) == 0.9, "before it diverged"


values = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30)


@given(values, st.integers(1, 60), st.sampled_from(list(Direction)))
def test_curves_are_kept_and_continued_within_what_is_plausible(
    seen: list[float], epochs: int, direction: Direction
) -> None:
    best = 1.0 if direction is Direction.MAX else 0.0
    curve = extended(seen, epochs, direction, best)
    assert len(curve) == epochs
    assert list(curve[: len(seen)]) == seen[:epochs]
    tail = curve[len(seen) :]
    assert all(0.0 <= value <= 1.0 or abs(value) < 10 for value in tail)
    steps = np.diff(tail)
    worse = steps < -1e-12 if direction is Direction.MAX else steps > 1e-12
    assert not worse.any(), "continued curves never turn back"
    assert all((value <= 1.0) if direction is Direction.MAX else (value >= 0.0) for value in tail)


@given(st.floats(0.1, 1.5), st.floats(0.05, 0.5), st.integers(12, 40))
def test_a_power_law_is_continued_as_one(b: float, a: float, known: int) -> None:
    epochs = np.arange(1, 101, dtype=float)
    truth = 0.9 - a * epochs**-b
    curve = extended(truth[:known].tolist(), 100, Direction.MAX, math.inf)
    assert curve == pytest.approx(truth.tolist(), abs=0.02)


def test_a_continued_curve_gains_less_than_was_gained() -> None:
    rising = [0.1 * n for n in range(1, 9)]
    curve = extended(rising, 16, Direction.MAX, math.inf)
    assert curve[-1] - curve[7] <= rising[7] - rising[3] + 0.05, "a doubling gains no more than the last one"


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "seen", [[1e308, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1], [1e308, -1e308] * 4, [5e-324] * 8, [1.7e308, -1.7e308]]
)
def test_losses_that_explode_are_replayed_as_numbers(seen: list[float], direction: Direction) -> None:
    """Warnings are errors in these tests."""
    curves = curves_of(RecordedTrial(tuple(seen), 1.0), direction=direction)
    config = curves.configs[0]
    assert all(map(math.isfinite, curves.curve(config, 40, child_rng(0, "x"))))
    found = curves.best_range(config, 40)
    assert found is not None
    assert all(map(math.isfinite, found))
    between = [value for value in by_epoch([(1, seen[0]), (9, seen[1])]) if value is not None]
    assert all(min(seen[:2]) <= value <= max(seen[:2]) for value in between)


def test_short_or_falling_curves_are_held() -> None:
    assert extended([0.1, 0.5, 0.7], 6, Direction.MAX, 1.0)[3:] == (0.7, 0.7, 0.7)
    falling = extended([0.9 - 0.05 * n for n in range(10)], 14, Direction.MAX, 1.0)
    assert len(set(falling[10:])) == 1
    assert falling[-1] <= 0.9


def test_a_trial_that_diverged_stays_so() -> None:
    curve = extended([0.1, None, 0.3], 5, Direction.MAX, 1.0)
    assert curve[0] == 0.1
    assert all(math.isnan(value) for value in curve[1:])


def test_curves_say_where_their_values_come_from() -> None:
    curves = RecordedCurves(
        name="it",
        metric="accuracy",
        direction=Direction.MAX,
        configs=((("row", 0),), (("row", 1),)),
        trials={0: RecordedTrial((0.5, 0.6), 1.2)},
    )
    known, new = curves.configs
    assert [curves.origin(known, epoch) for epoch in (2, 3)] == [
        ValueSource.RECORDED,
        ValueSource.EXTRAPOLATED,
    ]
    assert curves.origin(new, 1) is ValueSource.DRAWN
    assert curves.curve(new, 2, child_rng(0, "x")) == (0.5, 0.6)
    assert curves.relative_time(known) == 1.2
    assert curves.relative_time(new) is None


@pytest.mark.parametrize("policy", ["pollux", "tiresias", "optimus"])
def test_jobs_come_out_as_they_were(policy: str) -> None:
    journal = MemoryJournal()
    done = simulate(FEW_JOBS, policy, Setup(nodes=gpu_nodes(4, 4)), journal=journal)
    (again,) = replay_jobs(journal.events(), [policy])
    assert again.metrics.completed == again.metrics.jobs == done.metrics.jobs
    assert again.metrics.mean_jct_s == pytest.approx(done.metrics.mean_jct_s, rel=0.08)
    assert again.metrics.makespan_s == pytest.approx(done.metrics.makespan_s, rel=0.08)


def test_jobs_that_never_ran_are_left_out_and_named() -> None:
    journal = MemoryJournal()
    simulate(FEW_JOBS, "fifo", Setup(nodes=gpu_nodes(4, 4)), journal=journal)
    silent = FEW_JOBS.jobs[0].id
    heard = [e for e in journal.events() if not (isinstance(e, JobReported) and e.job_id == silent)]
    workload = recorded_workload(heard)
    assert len(workload.jobs) == len(FEW_JOBS.jobs) - 1
    assert silent in workload.notes[0]


@pytest.fixture
def stretto(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> StudyCommand:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return StudyCommand(monkeypatch, capsys)


MACHINE_STUDY = """
[study]
name = "digits"
metric = "accuracy"
direction = "max"
trials = 6
[halving]
rungs = "geometric"
min_epochs = 2
eta = 2
max_epochs = 8
[space]
lr = { log = [1e-4, 1.0] }
[machine]
slots = 2
usd_per_slot_hour = 3.6
[profile]
epoch_s = { mean = 10, sd = 1 }
speedup = { "1" = 1.0, "2" = 1.6 }
start_s = 1
"""


def folder_of_a_run(runs: Path, kind: str = "tune", policy: str = "asha", seed: int = SEED) -> list[Event]:
    """A run's folder as `tune` leaves it, of a simulated study on two slots."""
    import tomllib  # noqa: PLC0415

    folder = runs / "digits"
    folder.mkdir(parents=True)
    tables = tomllib.loads(MACHINE_STUDY)
    asked = {"study": tables, "policy": policy, "seed": seed, "budget_usd": None}
    spec = {
        "kind": kind,
        "deadline_s": None,
        "budget_usd": None,
        "file": "study.toml",
        "asked": asked,
        "slots": 2,
        "offer": dataclasses.asdict(slots_offer(2, MachineSpec())),
        "started_at_s": 0.0,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    journal = SqliteJournal(folder / "journal.sqlite", run="digits")
    try:
        if kind == "tune":
            run(policy, MACHINE_STUDY, seed=seed, journal=journal)
        else:
            simulate(FEW_JOBS, "fifo", Setup(nodes=gpu_nodes(4, 4)), journal=journal)
        return list(journal.events())
    finally:
        journal.close()


def test_the_command_puts_the_run_beside_its_replays(stretto: StudyCommand, tmp_path: Path) -> None:
    folder_of_a_run(tmp_path / "runs")
    code, out, err = stretto("simulate", "--replay", "digits", "--policy", "asha,rubberband")
    assert code == 0
    assert "asha (real)" in out
    assert "| rubberband " in out
    assert "100%" in out
    assert re.search(
        r"6 trials showed up to 8 of 8 epochs; what \d of them did not show is extrapolated\.", err
    )
    found = stretto.json("simulate", "--replay", "digits", "--policy", "asha")
    (again,) = found["runs"]
    assert again["best_metric"] == pytest.approx(found["actual"]["best_metric"], rel=0.01)
    assert again["finished_s"] == pytest.approx(found["actual"]["finished_s"], rel=0.1)
    assert again["shares"]["recorded"] > 0.8
    assert set(again["extrapolated_best"] or {"low": 0, "high": 0}) == {"low", "high"}
    assert "| might be" in out


def test_nothing_is_continued_where_every_trial_came_to_its_end(
    stretto: StudyCommand, tmp_path: Path
) -> None:
    folder_of_a_run(tmp_path / "runs", policy="random", seed=0)
    _, _, err = stretto("simulate", "--replay", "digits", "--policy", "asha")
    assert re.search(r"trials showed up to (\d+) of \1 epochs\.\n", err), err


def test_the_command_replays_jobs(stretto: StudyCommand, tmp_path: Path) -> None:
    folder_of_a_run(tmp_path / "runs", "run")
    code, out, _ = stretto("simulate", "--replay", tmp_path / "runs" / "digits", "--policy", "tiresias")
    assert code == 0
    assert out.startswith("asha (real): 5/5 jobs done, mean JCT ")
    assert "| tiresias " in out


def test_the_command_refuses_what_does_not_go_together(stretto: StudyCommand, tmp_path: Path) -> None:
    folder_of_a_run(tmp_path / "runs")
    assert "--nodes" in stretto.refused("simulate", "--replay", "digits", "--nodes", 3)
    assert "--deadline" in stretto.refused("simulate", "--replay", "digits", "--deadline", "3m")
    assert "there is no run 'other'" in stretto.refused("simulate", "--replay", "other")


@pytest.mark.parametrize(
    ("best", "extrapolated", "said"),
    [
        (0.35, None, "asha (replay): 0.35 in 1m 30s"),
        (
            0.34,
            Extrapolated(0.34, 0.36),
            "): 0.34, or 0.3400-0.3600 (extrapolated), in 1m",
        ),
        (
            None,
            Extrapolated(0.1, 0.2),
            ": no recorded value, or 0.1000-0.2000 (extrapolated), in",
        ),
    ],
)
def test_a_summary_tells_what_was_recorded_from_what_was_not(
    best: float | None, extrapolated: Extrapolated | None, said: str
) -> None:
    result = replace(run("asha", NO_LIMITS).result, policy="asha", best_metric=best, finished_s=90.0)
    seen = 1.0 if extrapolated is None else 0.5
    shares = {ValueSource.RECORDED: seen, ValueSource.EXTRAPOLATED: 1.0 - seen, ValueSource.DRAWN: 0.0}
    other = Replayed(result=result, extrapolated=extrapolated, shares=shares)
    assert said in compared_text(other)
    told = replayed_json(other)
    assert told["best_metric"] == best
    assert told["extrapolated_best"] == (None if extrapolated is None else dataclasses.asdict(extrapolated))


def test_timing_thousands_of_trials_takes_memory_in_proportion_to_them() -> None:
    def history(number: int) -> JobHistory:
        shown = (Result(epoch, 0.5, epoch_s=0.1 * (1 + number % 3), workers=1, nodes=1) for epoch in (1, 2))
        return JobHistory(make_job(f"trial-{number:03d}"), results=list(shown))

    trials = [history(number) for number in range(3000)]
    tracemalloc.start(1)
    try:
        times = Times.of(trials, Scaling(((1, 1.0), (2, 1.8))))
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 1000 * len(trials)
    assert [times.by_trial[number] for number in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert times.epoch_sd == pytest.approx(0.0, abs=1e-9)
