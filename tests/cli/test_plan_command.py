"""`init study` and `plan` as a user meets them."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stretto.cli.flags import parse_deadline_s
from stretto.core.errors import InputError
from stretto.inputs.study import EXAMPLE_STUDY
from study_command import StudyCommand, without_libraries, write
from study_inputs import NO_LIMITS, SMALL_STUDY

PLAN_KEYS = {
    "feasible", "deadline_s", "budget_usd", "q", "cost_usd", "jct_s", "p_on_time", "stages", "static",
    "frontier", "earliest", "planning_s",
}  # fmt: skip


@pytest.fixture
def stretto(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> StudyCommand:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return StudyCommand(monkeypatch, capsys)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write(tmp_path / "study.toml", SMALL_STUDY)


def test_init_writes_the_example_and_says_what_is_next(stretto: StudyCommand, tmp_path: Path) -> None:
    code, out, _ = stretto("init", "study")
    assert code == 0
    assert (tmp_path / "study.toml").read_text(encoding="utf-8") == EXAMPLE_STUDY
    assert "stretto plan study.toml" in out


def test_the_example_says_what_every_field_is_for(stretto: StudyCommand, tmp_path: Path) -> None:
    stretto("init", "study", "mine.toml")
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert "stretto plan mine.toml" in text
    assert "study.toml" not in text
    lines = text.splitlines()
    fields = [line for line in lines if re.match(r"\w+ = ", line)]
    assert len(fields) >= 25
    assert all("#" in line for line in fields)


def test_init_does_not_overwrite(stretto: StudyCommand, tmp_path: Path) -> None:
    mine = write(tmp_path / "study.toml", "mine")
    assert "not overwritten" in stretto.refused("init", "study")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("place", ["nowhere/study.toml", "."])
def test_init_where_nothing_can_be_written(stretto: StudyCommand, place: str) -> None:
    assert place in stretto.refused("init", "study", place)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_init_in_a_folder_that_is_read_only(stretto: StudyCommand, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "cannot be written" in stretto.refused("init", "study")
    finally:
        tmp_path.chmod(0o700)


def test_init_knows_studies_only(stretto: StudyCommand) -> None:
    assert "study" in stretto.refused("init", "lunch")


def test_the_example_can_be_planned_at_once(stretto: StudyCommand) -> None:
    stretto("init", "study")
    code, out, err = stretto("plan", "study.toml")
    assert code == 0
    assert err == ""
    assert "\x1b" not in out
    for said in (
        "a deadline of 2h 00m and a budget of $120.00",
        "| cheapest",
        "| chosen",
        "| fastest",
        "| best fixed cluster",
        "An hour more would save $",
        "Largest uncertainty: ",
        "o frontier",
    ):
        assert said in out


def test_plan_json_has_the_documented_fields(stretto: StudyCommand, study: Path) -> None:
    found = stretto.json("plan", study, "--deadline", "15m", "--budget", "$1,000")
    assert set(found) >= PLAN_KEYS
    assert found["feasible"] is True
    assert (found["deadline_s"], found["budget_usd"], found["q"]) == (900.0, 1000.0, 0.9)
    for key in ("cost_usd", "jct_s"):
        assert set(found[key]) == {"mean", "p10", "p90"}
    for stage in found["stages"]:
        assert set(stage) >= {
            "stage", "first_epoch", "last_epoch", "trials", "gpus_per_trial", "nodes", "instance",
        }  # fmt: skip
    assert set(found["static"]) >= {"nodes", "cost_usd", "jct_s"}
    assert all(set(point) == {"jct_s", "cost_usd"} for point in [*found["frontier"], found["earliest"]])


def test_the_limits_of_the_file_count_where_no_flag_is_given(stretto: StudyCommand, study: Path) -> None:
    found = stretto.json("plan", study)
    assert (found["deadline_s"], found["budget_usd"]) == (2400.0, 30.0)
    found = stretto.json("plan", study, "--budget", "12.5")
    assert (found["deadline_s"], found["budget_usd"]) == (2400.0, 12.5)


def test_without_any_limit_the_trade_off_is_shown(stretto: StudyCommand, tmp_path: Path) -> None:
    path = write(tmp_path / "study.toml", NO_LIMITS)
    code, out, _ = stretto("plan", path)
    assert code == 0
    assert "Without a limit there is a trade-off" in out
    assert "An hour more" not in out
    found = stretto.json("plan", path)
    assert found["deadline_s"] is found["budget_usd"] is None


@pytest.mark.parametrize(
    ("limit", "followed"), [(("--deadline", "3m"), "earliest"), (("--budget", "0.5"), "cheapest")]
)
def test_an_infeasible_study_says_what_would_do(
    stretto: StudyCommand, tmp_path: Path, limit: tuple[str, str], followed: str
) -> None:
    path = write(tmp_path / "study.toml", NO_LIMITS)
    code, out, _ = stretto("plan", path, *limit)
    assert code == 1
    assert "No plan keeps a " in out
    offered = re.search(r"More (?:time|money): a (?:deadline|budget) of (\S+(?: \d+s)?) can be kept \(", out)
    assert offered is not None
    assert re.search(r"^Fewer .* fit within the limit \(", out, re.MULTILINE)
    assert re.search(r"Counted with: p3.8xlarge \$12.24/h \(4 GPUs\); an epoch takes 35 s on one GPU", out)
    assert "| earliest" in out
    assert stretto("plan", path, limit[0], offered[1])[0] == 0, "what is offered can be typed"
    assert f"Stages of the {followed} plan" in out
    found = stretto.json("plan", path, *limit, code=1)
    assert found["feasible"] is False
    assert found["cost_usd"] is None
    assert found["stages"] == []
    assert found["earliest"]["jct_s"] > 0


@pytest.mark.parametrize("option", ["planner=published", "planner=search", "rule=mean", "rule=quantile"])
def test_planning_options_are_taken(stretto: StudyCommand, study: Path, option: str) -> None:
    assert stretto.json("plan", study, "--set", f"rubberband.{option}")["feasible"]


def test_planning_options_change_the_answer(stretto: StudyCommand, study: Path) -> None:
    usual = stretto.json("plan", study)
    by_mean = stretto.json("plan", study, "--set", "rubberband.rule=mean")
    assert by_mean["earliest"]["jct_s"] < usual["earliest"]["jct_s"]
    published = stretto.json("plan", study, "--set", "rubberband.planner=published")
    assert published["frontier"] != usual["frontier"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "rubberband.rule=soft"], "quantile, mean"),
        (["--set", "rubberband.planner="], "search, published"),
        (["--set", "rubberband.speed=9"], "not for planning"),
        (["--set", "rubberband.replan=0.3"], "rubberband.planner and rubberband.rule"),
        (["--set", "pollux.p=-1"], "not for planning"),
        (["--set", "rule=mean"], "POLICY.OPTION=VALUE"),
        (["--deadline", "soon"], "not a duration"),
        (["--deadline", ""], "not a duration"),
        (["--deadline", "0"], "2h"),
        (["--deadline", "9" * 400], "never comes"),
        (["--budget", "0"], "sum of money"),
        (["--budget", "-5"], "sum of money"),
        (["--budget", "nan"], "sum of money"),
        (["--budget", "inf"], "sum of money"),
        (["--budget", "1,5"], "sum of money"),
        (["--budget", "9" * 400], "sum of money"),
        (["--budget", "much"], "sum of money"),
        (["--report", "."], "is a folder"),
        (["--seed", "x"], "--seed"),
        (["--nodes", "3"], "--nodes"),
    ],
)
def test_wrong_flags_of_plan_are_explained(
    stretto: StudyCommand, study: Path, words: list[str], said: str
) -> None:
    assert said in stretto.refused("plan", study, *words)


@pytest.mark.parametrize("words", [["plan"], ["simulate", "--study"]])
def test_files_that_are_no_studies(stretto: StudyCommand, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    write(tmp_path / "broken.toml", "[study\n")
    write(tmp_path / "empty.toml", "")
    assert "stretto init study" in stretto.refused(*words, "missing.toml")
    assert "cannot be read" in stretto.refused(*words, ".")
    assert "UTF-8" in stretto.refused(*words, "binary.toml")
    assert "is not TOML" in stretto.refused(*words, "broken.toml")
    assert "study is missing" in stretto.refused(*words, "empty.toml")


def test_the_report_of_a_plan_is_written_and_loads_nothing(
    stretto: StudyCommand, study: Path, tmp_path: Path
) -> None:
    report = tmp_path / "new" / "plan.html"
    code, out, err = stretto("plan", study, "--report", report)
    assert code == 0
    assert "| chosen" in out
    assert str(report) in err
    page = without_libraries(report)
    assert "Plan of resnet-cifar" in page
    assert not re.search(r'(src|href)\s*=\s*["\']?\s*(https?:)?//', page)
    assert "default-src 'none'" in page


def test_an_infeasible_plan_has_a_report_too(stretto: StudyCommand, study: Path, tmp_path: Path) -> None:
    code, _, _ = stretto("plan", study, "--deadline", "1m", "--report", tmp_path / "plan.html")
    assert code == 1
    assert "No plan keeps a deadline of 1m 00s" in without_libraries(tmp_path / "plan.html")


@pytest.mark.parametrize(
    ("text", "hours"), [("18:00", 3.5), ("14:30", 24.0), ("9:05", 18 + 35 / 60), ("2h", 2.0), (None, None)]
)
def test_a_deadline_may_be_a_time_of_day(text: str | None, hours: float | None) -> None:
    now = datetime(2026, 11, 15, 14, 30, tzinfo=UTC)
    assert parse_deadline_s(text, now) == (None if hours is None else pytest.approx(3600 * hours))


@pytest.mark.parametrize("text", ["yesterday", "25:00", "0"])
def test_a_deadline_that_is_none_is_told_all_that_may_be_written(text: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_deadline_s(text, datetime(2026, 11, 15, 14, 30, tzinfo=UTC))
    assert refused.value.remedy.endswith("; a time of day, 18:00; or none.")
