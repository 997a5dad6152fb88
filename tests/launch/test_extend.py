"""More time or money for a run that was begun."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from launching import finished, prepare, start
from stretto.core.errors import InputError
from stretto.core.events import RunPaused, RunStarted
from stretto.core.units import format_duration, parse_duration_s
from stretto.driving.local_target import ThisMachine
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.inputs.arguments import deadline_words, given_deadline_s
from stretto.launch.extend import extend
from stretto.report.run_text import tune_text
from stretto.runs.deadline import EndedBy, given_duration_s
from stretto.runs.folder import RunFolder, Tables
from stretto.runs.live_state import JobPhase
from stretto.runs.results import TuneResult
from stretto.simulation.replay import replay
from study_command import StudyCommand
from tune_world import STUDY, simulated, write_study

MOVED = re.compile(r"the deadline was 39s and is 15m 00s, 1[45]m \d\ds from now")
"""From 39 s to a quarter of an hour."""
PRICED = STUDY.replace("slots = 2", "slots = 2\nusd_per_slot_hour = 36")
"""A cent a second for each."""


def asked(
    here: Path,
    deadline: str | None = None,
    *,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    policy: str = "asha",
    text: str = STUDY,
) -> CheckedStudy:
    given_s = float(deadline.removesuffix("s")) if deadline and deadline_s is None else deadline_s
    return check_request(
        TuneRequest(
            study=write_study(here, text),
            work="train.py:train",
            policy=policy,
            deadline_s=given_s,
            deadline_as=deadline,
            budget_usd=budget_usd,
        )
    )


def tuned(checked: CheckedStudy) -> TuneResult:
    return start(prepare(checked, make=simulated), make=simulated)


def epochs(result: TuneResult) -> int:
    return sum(trial.epochs for trial in result.trials)


@pytest.mark.parametrize("policy", ["asha", "hypersched", "rubberband"])
def test_a_run_that_a_deadline_ended_goes_on_with_a_later_one(here: Path, policy: str) -> None:
    short = tuned(asked(here, "39s", policy=policy))
    assert short.ended_by == EndedBy.DEADLINE
    later = asked(here, "900s", policy=policy)
    told = extend(later)
    assert MOVED.match(told), told
    assert finished(later) is None
    result = tuned(later)
    assert result.ended_by == EndedBy.JOBS
    assert epochs(result) > epochs(short)
    assert finished(later) == result
    assert not extend(later), "the same command once more"


@pytest.mark.parametrize("deadline", [math.inf, 600, 600.0, 90.5, 1e-5, 1e17, "10m", None])
def test_a_deadline_of_a_call_is_understood_when_it_is_read_again(deadline: float | str | None) -> None:
    words: Tables = {"deadline": deadline_words(deadline), "study": {}}
    given_s = given_deadline_s(deadline)
    assert given_duration_s(words) == (None if given_s == math.inf else given_s)


def test_a_run_without_a_deadline_is_not_given_one_later(here: Path) -> None:
    free, limited = (
        dataclasses.replace(asked(here, "9s", deadline_s=given_deadline_s(one)).request, deadline_as=words)
        for one, words in ((math.inf, deadline_words(math.inf)), (600.0, "10m"))
    )
    tuned(check_request(free))
    assert not extend(check_request(limited))
    with pytest.raises(InputError, match="begun with other settings: deadline was"):
        finished(check_request(limited))


def test_a_later_deadline_brings_back_what_there_was_too_little_time_for(here: Path) -> None:
    short = tuned(asked(here, "39s", policy="hypersched"))
    assert JobPhase.STOPPED not in short.trials_by_state
    later = asked(here, "900s", policy="hypersched")
    extend(later)
    assert tuned(later).trials_by_state == {JobPhase.FINISHED: 6}


def test_what_was_expected_for_other_limits_is_not_compared(here: Path) -> None:
    tuned(asked(here, "39s"))
    later = asked(here, "900s")
    extend(later)
    result = tuned(later)
    assert result.predicted_finish_s is None
    (past,) = result.past_limits
    assert past.deadline_s is not None
    assert past.deadline_s <= 39.0
    told = f"from a deadline of {format_duration(past.deadline_s)}"
    assert told in tune_text(result, later.outline.study)
    assert any("limits were raised" in note for note in replay(later.folder, ["sha"]).notes)


def test_nothing_is_paid_between_its_end_and_its_resumption(here: Path) -> None:
    tuned(asked(here, "39s", text=PRICED))
    later = asked(here, "900s", text=PRICED)
    extend(later)
    *_, last = later.folder.events()
    assert isinstance(last, RunPaused)
    (past,) = later.folder.begun_spec().past_limits
    assert last.t_s == past.deadline_s


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"deadline": "30s"}, 'deadline was "39s" and is "30s"'),
        ({}, 'deadline was "39s" and is not given'),
        ({"deadline": "900s", "text": STUDY.replace("trials = 6", "trials = 7")}, "trials was 6 and is 7"),
        ({"deadline": "900s", "policy": "sha"}, 'policy was "asha" and is "sha"'),
        ({"deadline": "900s", "budget_usd": 1.0}, "budget_usd was not given and is 1.0"),
    ],
)
def test_anything_else_is_refused_as_ever(here: Path, change: dict[str, Any], told: str) -> None:
    tuned(asked(here, "39s"))
    other = asked(here, **change)
    assert not extend(other)
    with pytest.raises(InputError, match="begun with other settings") as refused:
        finished(other)
    assert told in str(refused.value)


def test_a_deadline_that_is_over_already(here: Path) -> None:
    checked = asked(here, "39s")
    tuned(checked)
    spec = checked.folder.read("spec")
    assert spec is not None
    checked.folder.write("spec", {**spec, "started_at_s": time.time() - 3600.0})
    with pytest.raises(InputError, match=r"passed 45m \d\ds ago\. Give 1h0[12]m or more, or a time of day"):
        extend(asked(here, "900s"))
    extend(asked(here, "23:59", deadline_s=600.0))
    moved = checked.folder.spec()
    assert moved is not None
    assert moved.deadline_s == pytest.approx(4200.0, abs=60.0)


def test_a_deadline_that_is_over_is_told_as_given_and_the_advice_works(here: Path) -> None:
    checked = asked(here, "39s")
    tuned(checked)
    spec = checked.folder.read("spec")
    assert spec is not None
    began = {"started_at_s": time.time() - 300.0, "deadline_s": 20.0}  # 19 s went into measuring
    checked.folder.write("spec", {**spec, **began})
    with pytest.raises(InputError, match=r"a deadline of 3m 00s from .* passed 2m \d\ds ago") as refused:
        extend(asked(here, "180s"))
    found = re.search(r"Give (\S+) or more", refused.value.remedy)
    assert found is not None
    advised_s = parse_duration_s(found[1])
    assert advised_s >= 300.0 + 19.0 + 60.0, "a minute to read and type it"
    assert extend(asked(here, found[1], deadline_s=advised_s))


def test_the_same_deadline_in_other_words(here: Path) -> None:
    result = tuned(asked(here, "39s"))
    other = asked(here, "39.0s")
    assert not extend(other)
    assert finished(other) == result
    assert not result.past_limits


def test_a_limit_of_the_file_may_be_raised_there(here: Path) -> None:
    def limited(deadline: str) -> CheckedStudy:
        return asked(here, text=STUDY + f'\n[limits]\ndeadline = "{deadline}"\n')

    assert tuned(limited("39s")).ended_by == EndedBy.DEADLINE
    assert MOVED.match(extend(limited("15m")))
    assert tuned(limited("15m")).ended_by == EndedBy.JOBS
    assert not extend(limited("20s"))


@pytest.mark.parametrize("limit", ['deadline = "39s"', "budget_usd = 1.0"])
def test_a_limit_that_is_gone_from_the_file_is_not_lifted(here: Path, limit: str) -> None:
    limited = PRICED + f"\n[limits]\n{limit}\nq = 0.8\n"
    tuned(asked(here, text=limited))
    gone = asked(here, text=limited.replace(limit, ""))
    assert not extend(gone)
    with pytest.raises(InputError, match=r"study\.limits\..* and is not given"):
        finished(gone)


def test_none_on_the_command_line_lifts_a_limit_of_the_file(here: Path) -> None:
    limited = STUDY + '\n[limits]\ndeadline = "39s"\n'
    tuned(asked(here, text=limited))
    lifted = asked(here, "none", deadline_s=float("inf"), text=limited)
    assert extend(lifted).endswith("is lifted")


def test_a_deadline_may_be_lifted(here: Path) -> None:
    tuned(asked(here, "39s"))
    lifted = asked(here, "none", deadline_s=float("inf"))
    assert extend(lifted).endswith("is lifted")
    assert tuned(lifted).ended_by == EndedBy.JOBS


def test_more_time_is_of_no_use_once_every_trial_ended(here: Path) -> None:
    tuned(asked(here, "900s"))
    with pytest.raises(InputError, match="every trial has finished or was stopped"):
        extend(asked(here, "1900s"))


class TestBudget:
    def test_a_larger_one_goes_on(self, here: Path) -> None:
        short = tuned(asked(here, budget_usd=1.0, text=PRICED))
        assert short.ended_by == EndedBy.BUDGET
        more = asked(here, budget_usd=100.0, text=PRICED)
        assert extend(more) == "the budget was $1 and is $100"
        result = tuned(more)
        assert result.ended_by == EndedBy.JOBS
        assert result.cost_usd > short.cost_usd

    def test_more_time_for_one_that_is_spent(self, here: Path) -> None:
        tuned(asked(here, "900s", budget_usd=1.0, text=PRICED))
        with pytest.raises(InputError, match=r"budget of \$1 is spent"):
            extend(asked(here, "1900s", budget_usd=1.0, text=PRICED))


def test_a_kill_while_limits_are_moved_costs_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(asked(here, "39s"))
    later = asked(here, "900s")
    write = RunFolder.write

    def killed(folder: RunFolder, name: str, tables: dict[str, Any]) -> None:
        if name == "spec":
            raise SystemExit(9)
        write(folder, name, tables)

    monkeypatch.setattr(RunFolder, "write", killed)
    with pytest.raises(SystemExit):
        extend(later)
    monkeypatch.setattr(RunFolder, "write", write)
    assert extend(later)
    assert sum(isinstance(event, RunPaused) for event in later.folder.events()) == 1
    assert tuned(later).ended_by == EndedBy.JOBS


def test_the_journal_keeps_what_the_run_was_begun_with(here: Path) -> None:
    tuned(asked(here, "39s"))
    begun = next(asked(here, "39s").folder.events())
    later = asked(here, "900s")
    extend(later)
    tuned(later)
    assert isinstance(begun, RunStarted)
    assert next(later.folder.events()) == begun


def test_the_command_says_what_it_did(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(asked(here, "39s"))
    later = asked(here, "900s")
    monkeypatch.setattr(ThisMachine, "make", lambda _, *given: simulated(*given))
    words = ("tune", later.request.study, "train.py:train", "--policy", "asha", "--deadline", "900s")
    code, out, err = StudyCommand(monkeypatch, capsys)(*words)
    assert code == 0
    assert MOVED.search(err), err
    assert "runs/tiny: the deadline was" in err
    assert "limits          raised after" in out


def test_who_starts_it_again_after_its_deadline_is_told_of_a_later_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = asked(here, "39s")
    assert tuned(short).ended_by == EndedBy.DEADLINE
    words = ("tune", short.request.study, "train.py:train", "--policy", "asha", "--deadline")
    _, _, err = StudyCommand(monkeypatch, capsys)(*words, "39s")
    found = re.search(
        r"tiny: its deadline has passed; to continue, give a later one, such as --deadline (\w+)\.",
        err,
    )
    assert found is not None, err
    later_s = parse_duration_s(found[1])
    assert extend(asked(here, found[1], deadline_s=later_s)), "the advice works"
    assert finished(asked(here, found[1], deadline_s=later_s)) is None


def test_a_run_that_is_not_there_or_the_same_is_left_alone(here: Path) -> None:
    checked = asked(here, "39s")
    assert not extend(checked)
    tuned(checked)
    before = dataclasses.asdict(checked.folder.begun_spec())
    assert not extend(checked)
    assert dataclasses.asdict(checked.folder.begun_spec()) == before
