"""`init study`, `plan` and `simulate --study` as a user meets them."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.app.study_file import EXAMPLE_STUDY
from stretto.cli.main import main
from study_inputs import NO_LIMITS, SMALL_STUDY, TUNING_POLICIES, curve_table, edited, with_table

RUN_KEYS = {
    "policy", "deadline_s", "seed", "best_metric", "trials_started", "gpu_hours", "cost_usd", "finished_s",
}  # fmt: skip
PLAN_KEYS = {
    "feasible", "deadline_s", "budget_usd", "q", "cost_usd", "jct_s", "p_on_time", "stages", "static",
    "frontier", "earliest", "planning_s",
}  # fmt: skip


class Stretto:
    """Runs the command in this process, in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["stretto", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else int(code is not None)), out, err

    def json(self, *words: object, code: int = 0) -> Any:
        ended, out, _ = self(*words, "--json")
        assert ended == code
        return json.loads(out)

    def refused(self, *words: object) -> str:
        """What is said to something wrong: a sentence, exit code 2, and nothing on standard output."""
        code, out, err = self(*words)
        assert code == 2
        assert out == ""
        assert "Traceback" not in err
        return err


@pytest.fixture
def stretto(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Stretto:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Stretto(monkeypatch, capsys)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write(tmp_path / "study.toml", SMALL_STUDY)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# init


def test_init_writes_the_example_and_says_what_is_next(stretto: Stretto, tmp_path: Path) -> None:
    code, out, _ = stretto("init", "study")
    assert code == 0
    assert (tmp_path / "study.toml").read_text(encoding="utf-8") == EXAMPLE_STUDY
    assert "stretto plan study.toml" in out


def test_the_example_says_what_every_field_is_for(stretto: Stretto, tmp_path: Path) -> None:
    stretto("init", "study", "mine.toml")
    lines = (tmp_path / "mine.toml").read_text(encoding="utf-8").splitlines()
    fields = [line for line in lines if re.match(r"\w+ = ", line)]
    assert len(fields) >= 25
    assert all("#" in line for line in fields)


def test_init_does_not_overwrite(stretto: Stretto, tmp_path: Path) -> None:
    mine = write(tmp_path / "study.toml", "mine")
    assert "not overwritten" in stretto.refused("init", "study")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("place", ["nowhere/study.toml", "."])
def test_init_where_nothing_can_be_written(stretto: Stretto, place: str) -> None:
    assert place in stretto.refused("init", "study", place)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_init_in_a_folder_that_is_read_only(stretto: Stretto, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "cannot be written" in stretto.refused("init", "study")
    finally:
        tmp_path.chmod(0o700)


def test_init_knows_studies_only(stretto: Stretto) -> None:
    assert "study" in stretto.refused("init", "lunch")


# plan


def test_the_example_can_be_planned_at_once(stretto: Stretto) -> None:
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
        "Largest source of doubt: ",
        "o frontier",
    ):
        assert said in out


def test_plan_json_has_the_documented_fields(stretto: Stretto, study: Path) -> None:
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


def test_the_limits_of_the_file_count_where_no_flag_is_given(stretto: Stretto, study: Path) -> None:
    found = stretto.json("plan", study)
    assert (found["deadline_s"], found["budget_usd"]) == (2400.0, 30.0)
    found = stretto.json("plan", study, "--budget", "12.5")
    assert (found["deadline_s"], found["budget_usd"]) == (2400.0, 12.5)


def test_without_any_limit_the_trade_off_is_shown(stretto: Stretto, tmp_path: Path) -> None:
    path = write(tmp_path / "study.toml", NO_LIMITS)
    code, out, _ = stretto("plan", path)
    assert code == 0
    assert "Without a limit there is a trade-off" in out
    assert "An hour more" not in out
    found = stretto.json("plan", path)
    assert found["deadline_s"] is found["budget_usd"] is None


@pytest.mark.parametrize("limit", [("--deadline", "3m"), ("--budget", "0.5")])
def test_an_infeasible_study_says_what_would_do(
    stretto: Stretto, tmp_path: Path, limit: tuple[str, str]
) -> None:
    path = write(tmp_path / "study.toml", NO_LIMITS)
    code, out, _ = stretto("plan", path, *limit)
    assert code == 1
    assert "No plan keeps a " in out
    assert re.search(r"The earliest deadline that can be kept is \d+m \d+s, for \$\d", out)
    assert re.search(r"the cheapest plan costs \$\d+\.\d\d and takes \d+m", out)
    assert "| earliest" in out
    assert "Stages of the earliest plan" in out
    found = stretto.json("plan", path, *limit, code=1)
    assert found["feasible"] is False
    assert found["cost_usd"] is None
    assert found["stages"] == []
    assert found["earliest"]["jct_s"] > 0


@pytest.mark.parametrize("option", ["planner=published", "planner=search", "rule=mean", "rule=quantile"])
def test_planning_options_are_taken(stretto: Stretto, study: Path, option: str) -> None:
    assert stretto.json("plan", study, "--set", f"rubberband.{option}")["feasible"]


def test_the_rule_changes_the_answer(stretto: Stretto, study: Path) -> None:
    by_mean = stretto.json("plan", study, "--set", "rubberband.rule=mean")["earliest"]["jct_s"]
    assert by_mean < stretto.json("plan", study)["earliest"]["jct_s"]


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
    stretto: Stretto, study: Path, words: list[str], said: str
) -> None:
    assert said in stretto.refused("plan", study, *words)


@pytest.mark.parametrize("words", [["plan"], ["simulate", "--study"]])
def test_files_that_are_no_studies(stretto: Stretto, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    write(tmp_path / "broken.toml", "[study\n")
    write(tmp_path / "empty.toml", "")
    assert "stretto init study" in stretto.refused(*words, "missing.toml")
    assert "cannot be read" in stretto.refused(*words, ".")
    assert "UTF-8" in stretto.refused(*words, "binary.toml")
    assert "is not TOML" in stretto.refused(*words, "broken.toml")
    assert "study is missing" in stretto.refused(*words, "empty.toml")


def without_libraries(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"<script>.{1000000,}?</script>", "", text, flags=re.DOTALL)


def test_the_report_of_a_plan_is_written_and_loads_nothing(
    stretto: Stretto, study: Path, tmp_path: Path
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


def test_an_infeasible_plan_has_a_report_too(stretto: Stretto, study: Path, tmp_path: Path) -> None:
    code, _, _ = stretto("plan", study, "--deadline", "1m", "--report", tmp_path / "plan.html")
    assert code == 1
    assert "No plan keeps a deadline of 1m 00s" in without_libraries(tmp_path / "plan.html")


# simulate --study


def simulate(stretto: Stretto, study: Path, *words: object) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = stretto.json("simulate", "--study", study, *words)["runs"]
    return runs


def test_simulate_json_has_the_documented_fields(stretto: Stretto, study: Path) -> None:
    runs = simulate(stretto, study, "--policy", "hypersched,asha", "--seeds", 3, "--seed", 5)
    assert all(set(run) == RUN_KEYS for run in runs)
    assert [(run["policy"], run["seed"]) for run in runs] == [
        (policy, seed) for policy in ("hypersched", "asha") for seed in (5, 6, 7)
    ]
    assert all(run["deadline_s"] == 2400.0 for run in runs)
    assert all(0 < run["best_metric"] < 1 for run in runs)
    assert len({run["best_metric"] for run in runs if run["policy"] == "asha"}) == 3


def test_the_policies_of_the_issue_run_unless_others_are_named(stretto: Stretto, study: Path) -> None:
    runs = simulate(stretto, study)
    assert [run["policy"] for run in runs] == ["hypersched", "asha", "sha", "hyperband", "rubberband"]


def test_a_deadline_is_kept_by_all(stretto: Stretto, study: Path) -> None:
    runs = simulate(stretto, study, "--policy", ",".join(TUNING_POLICIES), "--deadline", "6m", "--seeds", 2)
    assert len(runs) == 2 * len(TUNING_POLICIES)
    assert all(run["deadline_s"] == 360.0 and 0 < run["finished_s"] <= 360.0 for run in runs)


def test_runs_repeat(stretto: Stretto, study: Path) -> None:
    words = ("--policy", "hypersched,rubberband", "--seeds", 2)
    assert simulate(stretto, study, *words) == simulate(stretto, study, *words)


def test_the_table_shows_every_policy_and_means(stretto: Stretto, study: Path) -> None:
    code, out, err = stretto("simulate", "--study", study, "--policy", "asha,fifo", "--seeds", 2)
    assert code == 0
    assert out.startswith("resnet-cifar: best accuracy (max) until 40m 00s, means of 2 simulations\n")
    assert "| asha " in out
    assert "| fifo " in out
    assert "synthetic" in err
    assert "synthetic" not in out
    assert "\x1b" not in out + err


def test_options_reach_a_tuning_policy(stretto: Stretto, study: Path) -> None:
    plain = simulate(stretto, study, "--policy", "asha")
    stopping = simulate(stretto, study, "--policy", "asha", "--set", "asha.variant=stop")
    assert plain != stopping


def test_a_study_that_shows_nothing_has_null_for_a_metric(stretto: Stretto, study: Path) -> None:
    (run,) = simulate(stretto, study, "--policy", "asha", "--deadline", "10s")
    assert run["best_metric"] is None
    assert "| none" in stretto("simulate", "--study", study, "--policy", "asha", "--deadline", "10s")[1]


def test_diverged_trials_do_not_win(stretto: Stretto, tmp_path: Path) -> None:
    table = {
        "good": ["0.5"] * 28,
        "lost": ["0.9", "nan", *["0.0"] * 26],
        "gone": ["inf"] * 28,
        "fair": ["0.7"] * 28,
    }
    write(tmp_path / "curves.csv", curve_table(table))
    path = write(tmp_path / "study.toml", with_table(SMALL_STUDY, "curves.csv"))
    runs = simulate(stretto, path, "--policy", ",".join([*TUNING_POLICIES, "fifo"]), "--seeds", 2)
    assert {run["best_metric"] for run in runs} == {0.5}
    assert "2 of 4 runs diverged" in stretto("simulate", "--study", path, "--policy", "asha")[2]


def test_the_report_of_a_study_is_written_and_loads_nothing(
    stretto: Stretto, study: Path, tmp_path: Path
) -> None:
    report = tmp_path / "study.html"
    words = ("--policy", "hypersched,rubberband", "--seeds", 2, "--report", report)
    code, out, err = stretto("simulate", "--study", study, *words)
    assert code == 0
    assert "| rubberband" in out
    assert str(report) in err
    page = without_libraries(report)
    assert "simulated, not measured" in page
    assert not re.search(r'(src|href)\s*=\s*["\']?\s*(https?:)?//', page)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "ashaa"], "asha"),
        (["--policy", "asha,asha"], "twice"),
        (["--policy", "asha", "--set", "sha.eta=2"], "not run"),
        (["--policy", "asha", "--set", "asha.what=2"], "no option 'what'"),
        (["--policy", "asha,optimus-oracle"], "optimus-oracle"),
        (["--seeds", "0"], "1 to 10000"),
        (["--seeds", "1000000"], "1 to 10000"),
        (["--seeds", "few"], "--seeds"),
        (["--deadline", "0s"], "2h"),
        (["--deadline", "tonight"], "not a duration"),
        (["--report", "."], "is a folder"),
        (["jobs.csv"], "--study"),
        (["--profiles", "."], "--profiles is about a workload"),
        (["--gpu-type", "t4"], "--gpu-type is about a workload"),
        (["--nodes", "3"], "--nodes is about a workload"),
        (["--gpus-per-node", "4"], "--gpus-per-node is about a workload"),
        (["--interval", "60s"], "--interval is about a workload"),
        (["--restart", "30s"], "--restart is about a workload"),
        (["--rounds"], "--rounds is about a workload"),
        (["--no-whole-seconds"], "--whole-seconds is about a workload"),
        (["--interference", "0"], "--interference is about a workload"),
        (["--noise", "0"], "--noise is about a workload"),
        (["--priors"], "--priors is about a workload"),
        (["--jobs", "3"], "--jobs is about a workload"),
        (["--hours", "3"], "--hours is about a workload"),
        (["--log-start", "3h"], "--log-start is about a workload"),
    ],
)
def test_wrong_flags_of_a_study_are_explained(
    stretto: Stretto, study: Path, words: list[str], said: str
) -> None:
    assert said in stretto.refused("simulate", "--study", study, *words)


@pytest.mark.parametrize("words", [["--deadline", "30m"], ["--seeds", "3"]])
def test_flags_of_a_study_need_one(stretto: Stretto, words: list[str]) -> None:
    assert "Add --study STUDY.toml" in stretto.refused("simulate", "builtin:demo", "--policy", "fifo", *words)


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_a_tuning_policy_needs_a_study(stretto: Stretto, policy: str) -> None:
    assert "--study STUDY.toml" in stretto.refused("simulate", "builtin:demo", "--policy", policy)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("builtin:resnet", "builtin:resnets", "Did you mean builtin:resnet?"),
        ("builtin:resnet", "somewhere", "of no known kind"),
        ("builtin:resnet", "missing.csv", "missing.csv"),
        ("builtin:resnet", "csv:curves.csv:min", 'direction = "min"'),
        ("builtin:resnet", "short.csv", "Set max_epochs to 3 or fewer"),
    ],
)
def test_worlds_that_do_not_suit_the_study(
    stretto: Stretto, tmp_path: Path, old: str, new: str, said: str
) -> None:
    write(tmp_path / "curves.csv", curve_table({"a": ["0.5"] * 28}))
    write(tmp_path / "short.csv", curve_table({"a": ["0.5"] * 3}))
    text = edited(SMALL_STUDY, (f'curves = "{old}"', f'curves = "{new}"'))
    path = write(tmp_path / "study.toml", text)
    assert said in stretto.refused("simulate", "--study", path, "--policy", "asha")


def test_help_fits_a_screen_and_has_an_example(stretto: Stretto) -> None:
    for command in ("plan", "init", "simulate"):
        code, out, _ = stretto(command, "--help")
        assert code == 0
        assert len(out.splitlines()) <= 60
        assert "Example:" in out


# nonsense

NONSENSE = (
    "0", "-1", "1", "3", "0.5", "1e9", "nan", "-inf", "true", '""', '"x"', '"\\u0000"', "[]", "{}", "[1, 2]",
    "{ mean = 1 }", "1979-05-27", "99999999999999999999", '"2h"', "{ log = [0, 1] }", '["p3.2xlarge"]',
)  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """One to three slips of the kind people and editors make."""
    for _ in range(chance.randrange(1, 4)):
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        match chance.randrange(7):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2 | 3:
                lines[at] = re.sub(r"= [^#]*", lambda _: f"= {chance.choice(NONSENSE)} ", lines[at], count=1)
            case 4:
                lines[at] = re.sub(r"[\d.]+", lambda _: chance.choice(NONSENSE), lines[at], count=1)
            case 5:
                place = chance.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:place] + chance.choice("\"'[]{}=#.,x\0\t\u00e9") + lines[at][place:]
            case _:
                lines = lines[:at]
        text = "\n".join([*lines, ""])
        if not lines:
            break
    return text


PLAIN_STUDY = "\n".join(
    line.split("#")[0].rstrip() for line in SMALL_STUDY.splitlines() if line.split("#")[0].strip()
)
"""Without comments, so that every slip hits something."""


@pytest.mark.parametrize("batch", range(10))
def test_a_malformed_study_is_explained_and_never_a_traceback(
    stretto: Stretto, tmp_path: Path, batch: int
) -> None:
    chance = random.Random(batch)
    path = tmp_path / "study.toml"
    codes = []
    for _ in range(20):
        path.write_bytes(mutated(PLAIN_STUDY, chance).encode())
        words = (
            ["plan", path]
            if chance.random() < 0.6
            else ["simulate", "--study", path, "--policy", "asha,fifo"]
        )
        code, _, err = stretto(*words)
        assert code in {0, 1, 2}, path.read_text()
        assert "Traceback" not in err
        assert err.startswith("error: ") if code == 2 else True
        codes.append(code)
    assert 2 in codes
