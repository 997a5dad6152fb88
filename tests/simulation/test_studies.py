"""Studies under policies, in simulated time: what every policy must keep to, and what is counted."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from live_processes import SUPPORT
from stretto.core.errors import InputError, JournalError
from stretto.inputs.study import EXAMPLE_STUDY
from stretto.journal.base import MemoryJournal
from stretto.journal.sqlite import SqliteJournal
from stretto.simulation.studies import StudyRun, fixed_cluster, with_limits
from study_inputs import (
    MUCH_FASTER,
    NO_LIMITS,
    SMALL_STUDY,
    TUNING_POLICIES,
    TWICE_AS_SLOW,
    cached_run,
    curve_table,
    edited,
    run,
    study_file,
    with_table,
)

HOUR_S = 3600.0
SHARED_CLUSTER_POLICIES = ("pollux", "optimus", "tiresias", "drf", "tetris", "srtf", "fifo")
FIXED = tuple(policy for policy in TUNING_POLICIES if policy != "rubberband")
WORLDS = {"as believed": SMALL_STUDY, "twice as slow": TWICE_AS_SLOW, "much faster": MUCH_FASTER}


def check_contract(done: StudyRun) -> None:
    """What is so of every simulated study, whatever the policy and the world."""
    result, study = done.result, done.file.tuning.study
    trials = done.history.jobs.values()
    limit_s = math.inf if result.deadline_s is None else result.deadline_s
    assert 0 < result.finished_s <= limit_s
    assert all(t_s <= result.finished_s for trial in trials for t_s in trial.result_s)
    assert all(hold.end_s <= limit_s for trial in trials for hold in trial.holds)
    assert all(len(trial.results) <= study.max_epochs for trial in trials)
    assert all(
        [one.epoch for one in trial.results] == [*range(1, len(trial.results) + 1)] for trial in trials
    )
    assert result.trials_started == sum(bool(trial.holds) for trial in trials) <= study.trials
    sound = [trial for trial in trials if all(one.value is not None for one in trial.results)]
    values = [one.value for trial in sound for one in trial.results if one.value is not None]
    assert result.best_metric == (max(values, key=study.score) if values else None)
    assert result.gpu_hours * HOUR_S == pytest.approx(sum(trial.gpu_s for trial in trials))
    assert result.cost_usd >= 0
    ends_s = [trial.end_s for trial in trials]
    if None not in ends_s:
        assert result.finished_s == max(end_s for end_s in ends_s if end_s is not None)
    elif result.deadline_s is not None:
        assert result.finished_s == result.deadline_s


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_belief_is_not_truth_and_the_contract_is_kept(policy: str, world: str) -> None:
    done = cached_run(policy, WORLDS[world])
    check_contract(done)
    assert any(trial.finished_s for trial in done.history.jobs.values()), "one trial is trained to the end"


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_a_tight_deadline_is_kept(policy: str) -> None:
    done = run(policy, edited(SMALL_STUDY, ('deadline = "40m"', 'deadline = "5m"')))
    check_contract(done)
    assert done.result.finished_s == done.result.deadline_s == 300.0
    assert done.result.best_metric is not None


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_a_deadline_before_the_first_epoch_leaves_nothing(policy: str) -> None:
    done = run(policy, edited(SMALL_STUDY, ('deadline = "40m"', "deadline = 1")))
    check_contract(done)
    assert done.result.best_metric is None


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_without_limits_a_study_ends_by_itself(policy: str) -> None:
    done = run(policy, NO_LIMITS)
    check_contract(done)
    assert done.result.deadline_s is None
    assert any(trial.finished_s for trial in done.history.jobs.values())


@pytest.mark.parametrize("policy", SHARED_CLUSTER_POLICIES)
def test_a_policy_for_shared_clusters_runs_a_study_too(policy: str) -> None:
    done = cached_run(policy)
    check_contract(done)
    assert done.result.trials_started == 8
    assert all(trial.finished_s is not None for trial in done.history.jobs.values())


def test_all_policies_meet_the_same_trials() -> None:
    runs = [cached_run(policy) for policy in (*TUNING_POLICIES, "fifo")]
    all_trials = cached_run("fifo").history.jobs
    for done in runs:
        for trial_id, trial in done.history.jobs.items():
            assert trial.job.config == all_trials[trial_id].job.config
            shown = [result.value for result in trial.results]
            assert shown == [result.value for result in all_trials[trial_id].results][: len(shown)]


def test_another_seed_is_another_world() -> None:
    one, other = cached_run("asha", seed=0), cached_run("asha", seed=1)
    assert one.history.jobs["trial-000"].job.config != other.history.jobs["trial-000"].job.config
    assert one.result.best_metric != other.result.best_metric


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_the_same_seed_gives_the_same_study(policy: str) -> None:
    assert run(policy).result == cached_run(policy).result


@pytest.mark.parametrize("policy", FIXED)
def test_a_fixed_cluster_is_paid_for_until_the_end(policy: str) -> None:
    done = cached_run(policy)
    (instance,) = done.file.tuning.instances
    seconds = math.ceil(done.result.finished_s)
    expected_usd = done.file.fixed_nodes * instance.usd_per_hour * seconds / HOUR_S
    assert done.result.cost_usd == pytest.approx(expected_usd)
    assert done.result.gpu_hours <= done.file.fixed_nodes * instance.gpus * seconds / HOUR_S


def test_billed_per_function_only_the_gpu_time_of_trials_costs() -> None:
    done = run("asha", edited(SMALL_STUDY, ('billing = "instance"', 'billing = "function"')))
    (instance,) = done.file.tuning.instances
    usd_per_gpu_hour = instance.usd_per_hour / instance.gpus
    assert done.result.cost_usd == pytest.approx(done.result.gpu_hours * usd_per_gpu_hour)


def test_rubberband_does_the_example_for_less_than_a_fixed_cluster() -> None:
    rented, fixed = (run(policy, EXAMPLE_STUDY).result for policy in ("rubberband", "sha"))
    assert rented.cost_usd <= fixed.cost_usd
    assert rented.finished_s <= 7200.0
    assert rented.best_metric is not None
    assert fixed.best_metric is not None
    assert rented.best_metric > fixed.best_metric - 0.01


def test_rubberband_holds_no_more_nodes_than_allowed() -> None:
    done = cached_run("rubberband", TWICE_AS_SLOW)
    moments = {hold.start_s for trial in done.history.jobs.values() for hold in trial.holds}
    for now_s in moments:
        held = {
            node
            for trial in done.history.jobs.values()
            for hold in trial.holds
            if hold.start_s <= now_s < hold.end_s
            for node in hold.allocation.nodes
        }
        assert len(held) <= 4


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_what_diverges_is_cut_and_never_wins(policy: str, tmp_path: Path) -> None:
    fine = {f"fine-{i}": [f"{(2 + i) / epoch:.4f}" for epoch in range(1, 29)] for i in range(5)}
    lost = {f"lost-{i}": ["0.001"] * (2 + i) + ["nan"] * (26 - i) for i in range(3)}
    (tmp_path / "curves.csv").write_text(curve_table({**fine, **lost}))
    done = run(policy, with_table(SMALL_STUDY, "curves.csv"), folder=tmp_path)
    check_contract(done)
    for trial in done.history.jobs.values():
        name = str(dict(trial.job.config)["trial"])
        if name.startswith("lost"):
            assert len(trial.results) <= 3 + int(name[-1]), "stopped at the first value that is not a number"
            assert trial.finished_s is None
    assert done.result.best_metric == pytest.approx(2 / 28, abs=1e-4)


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_a_study_in_which_everything_diverges_ends(policy: str, tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_text(curve_table({str(i): ["nan"] * 28 for i in range(8)}))
    done = run(policy, with_table(SMALL_STUDY, "curves.csv"), folder=tmp_path)
    check_contract(done)
    assert done.result.best_metric is None
    assert done.result.finished_s < done.result.deadline_s  # type: ignore[operator]


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_a_table_may_have_fewer_rows_than_the_study_wants(policy: str, tmp_path: Path) -> None:
    table = {str(i): [f"{(1 + i) / epoch:.4f}" for epoch in range(1, 29)] for i in range(5)}
    (tmp_path / "curves.csv").write_text(curve_table(table))
    done = run(policy, with_table(SMALL_STUDY, "curves.csv"), folder=tmp_path)
    check_contract(done)
    rows = [dict(trial.job.config)["row"] for trial in done.history.jobs.values()]
    assert sorted(rows) == [0, 1, 2, 3, 4], "each row is drawn once"
    assert any(trial.finished_s for trial in done.history.jobs.values())


def test_a_study_longer_than_its_curves_is_refused(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_text(curve_table({"a": ["0.5"] * 27}))
    with pytest.raises(InputError, match="27 or fewer"):
        run("asha", with_table(SMALL_STUDY, "curves.csv"), folder=tmp_path)


def test_limits_that_are_not_given_stay() -> None:
    file = study_file(SMALL_STUDY)
    assert with_limits(file) == file
    changed = with_limits(file, deadline_s=60.0).tuning.limits
    assert (changed.deadline_s, changed.budget_usd) == (60.0, 30.0)
    changed = with_limits(file, budget_usd=5.0).tuning.limits
    assert (changed.deadline_s, changed.budget_usd) == (2400.0, 5.0)


def test_the_fixed_cluster_is_of_the_first_instance_type() -> None:
    file = study_file(edited(SMALL_STUDY, ('["p3.8xlarge"]', '["p3.2xlarge", "p3.8xlarge"]')))
    nodes = fixed_cluster(file)
    assert [node.instance for node in nodes] == ["p3.2xlarge", "p3.2xlarge"]
    assert [node.gpus for node in nodes] == [1, 1]
    assert len({node.id for node in nodes}) == 2


def resumed_is_the_same(policy: str, text: str) -> None:
    whole = MemoryJournal()
    result = run(policy, text, journal=whole).result
    events = list(whole.events())
    for cut in (1, len(events) // 3, 2 * len(events) // 3, len(events) - 1):
        journal = MemoryJournal()
        journal.append(events[:cut])
        assert run(policy, text, journal=journal).result == result
        assert list(journal.events()) == events


@pytest.mark.parametrize("policy", [*TUNING_POLICIES, "fifo"])
def test_a_study_that_was_cut_short_goes_on_as_if_it_had_not_been(policy: str) -> None:
    resumed_is_the_same(policy, SMALL_STUDY)


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna, an extra, is not installed")
@pytest.mark.parametrize("policy", ["asha", "rubberband"])
def test_a_sampler_that_learns_is_resumed_too(policy: str) -> None:
    text = edited(SMALL_STUDY, ('sampler = "random"', 'sampler = "tpe"'))
    check_contract(run(policy, text))
    resumed_is_the_same(policy, text)


KILLED_CHILD = """
import os, signal, sys
from pathlib import Path
from stretto.journal.sqlite import SqliteJournal
from study_inputs import run

class Mortal(SqliteJournal):
    lives = int(sys.argv[3])

    def append(self, events):
        super().append(events)
        self.lives -= 1
        if not self.lives:
            os.kill(os.getpid(), signal.SIGKILL)

run(sys.argv[2], journal=Mortal(Path(sys.argv[1]), run="study"))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("policy", "turns"), [("hypersched", 40), ("rubberband", 60)])
def test_a_killed_study_goes_on_from_its_journal(policy: str, turns: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    child = subprocess.run(
        [sys.executable, "-c", KILLED_CHILD, path, policy, str(turns)],
        cwd=SUPPORT,
        check=False,
        timeout=60,
    )
    assert child.returncode == -signal.SIGKILL, "it was over before the kill"
    whole = MemoryJournal()
    result = run(policy, journal=whole).result
    journal = SqliteJournal(path, run="study")
    before = len(list(journal.events()))
    assert run(policy, journal=journal).result == result
    resumed = list(journal.events())
    journal.close()
    assert 0 < before < len(resumed)
    assert resumed == list(whole.events())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trials = 8", "trials = 9"),
        ('deadline = "40m"', 'deadline = "41m"'),
        ("eta = 2", "eta = 3"),
        ("lr = { log = [1e-4, 1.0] }", "lr = { log = [1e-3, 1.0] }"),
    ],
)
def test_another_study_does_not_go_on_from_a_journal(old: str, new: str) -> None:
    journal = MemoryJournal()
    whole = MemoryJournal()
    run("asha", journal=whole)
    journal.append(list(whole.events())[:50])
    with pytest.raises(JournalError):
        run("asha", edited(SMALL_STUDY, (old, new)), journal=journal)


def test_a_result_is_a_row_of_plain_values() -> None:
    row = dataclasses.asdict(cached_run("asha").result)
    assert all(value is None or isinstance(value, str | int | float) for value in row.values())


@pytest.mark.parametrize("policy", ["hypersched", "rubberband"])
def test_the_budget_is_a_cap(policy: str) -> None:
    poor = edited(SMALL_STUDY, ("budget_usd = 30", "budget_usd = 2.5"))
    done = run(policy, poor)
    assert done.result.ended_by == "budget"
    assert 2.3 < done.result.cost_usd <= 2.5
    assert done.result.finished_s < 2400.0
    assert run(policy, SMALL_STUDY).result.ended_by != "budget"


def test_nodes_that_start_up_cost_even_if_they_never_come() -> None:
    slow = edited(
        SMALL_STUDY,
        ("init_s = { mean = 30, sd = 8 }", "init_s = 3000"),
        ("queue_s = { mean = 40, sd = 10 }", "queue_s = 100"),
    )
    done = run("rubberband", slow)
    assert done.result.trials_started == 0
    assert done.result.cost_usd > 12.24 * 2000 / 3600


@pytest.mark.parametrize("policy", ["sha", "rubberband"])
def test_a_short_table_makes_a_smaller_study(policy: str, tmp_path: Path) -> None:
    curves = {str(i): [f"{(2 + i) / epoch:.4f}" for epoch in range(1, 29)] for i in range(4)}
    (tmp_path / "curves.csv").write_text(curve_table(curves))
    done = run(policy, with_table(SMALL_STUDY, "curves.csv"), folder=tmp_path)
    assert done.file.tuning.study.trials == 4
    epochs = sorted(len(trial.results) for trial in done.history.jobs.values())
    assert epochs == [4, 4, 12, 28], "halved from 4, as if 4 had been asked for"


def test_a_table_leaves_a_sampler_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_text(curve_table({"a": ["1.0"] * 28}))
    asked = edited(with_table(SMALL_STUDY, "curves.csv"), ('sampler = "random"', 'sampler = "tpe"'))
    with pytest.raises(InputError, match="nothing to draw"):
        run("asha", asked, folder=tmp_path)
