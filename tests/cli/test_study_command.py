"""`simulate --study` as a user meets it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from study_command import StudyCommand, without_libraries, write
from study_inputs import SMALL_STUDY, TUNING_POLICIES, curve_table, edited, with_table

RUN_KEYS = {
    "policy", "deadline_s", "seed", "best_metric", "trials_started", "gpu_hours", "cost_usd", "finished_s",
    "ended_by",
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


def simulate(stretto: StudyCommand, study: Path, *words: object) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = stretto.json("simulate", "--study", study, *words)["runs"]
    return runs


def test_simulate_json_has_the_documented_fields(stretto: StudyCommand, study: Path) -> None:
    runs = simulate(stretto, study, "--policy", "hypersched,asha", "--seeds", 3, "--seed", 5)
    assert all(set(run) == RUN_KEYS for run in runs)
    assert [(run["policy"], run["seed"]) for run in runs] == [
        (policy, seed) for policy in ("hypersched", "asha") for seed in (5, 6, 7)
    ]
    assert all(run["deadline_s"] == 2400.0 for run in runs)
    assert all(0 < run["best_metric"] < 1 for run in runs)
    assert len({run["best_metric"] for run in runs if run["policy"] == "asha"}) == 3


def test_the_policies_of_the_issue_run_unless_others_are_named(stretto: StudyCommand, study: Path) -> None:
    runs = simulate(stretto, study)
    assert [run["policy"] for run in runs] == ["hypersched", "asha", "sha", "hyperband", "rubberband"]


def test_a_deadline_is_kept_by_all(stretto: StudyCommand, study: Path) -> None:
    runs = simulate(stretto, study, "--policy", ",".join(TUNING_POLICIES), "--deadline", "6m", "--seeds", 2)
    assert len(runs) == 2 * len(TUNING_POLICIES)
    assert all(run["deadline_s"] == 360.0 and 0 < run["finished_s"] <= 360.0 for run in runs)


def test_runs_repeat(stretto: StudyCommand, study: Path) -> None:
    words = ("--policy", "hypersched,rubberband", "--seeds", 2)
    assert simulate(stretto, study, *words) == simulate(stretto, study, *words)


def test_the_table_shows_every_policy_and_means(stretto: StudyCommand, study: Path) -> None:
    code, out, err = stretto("simulate", "--study", study, "--policy", "asha,fifo", "--seeds", 2)
    assert code == 0
    assert out.startswith("resnet-cifar: best accuracy (max) until 40m 00s, means of 2 simulations\n")
    assert "| asha " in out
    assert "| fifo " in out
    assert "synthetic" in err
    assert "synthetic" not in out
    assert "\x1b" not in out + err


def test_options_reach_a_tuning_policy(stretto: StudyCommand, study: Path) -> None:
    plain = simulate(stretto, study, "--policy", "asha")
    stopping = simulate(stretto, study, "--policy", "asha", "--set", "asha.variant=stop")
    assert plain != stopping


def test_a_study_that_shows_nothing_has_null_for_a_metric(stretto: StudyCommand, study: Path) -> None:
    (run,) = simulate(stretto, study, "--policy", "asha", "--deadline", "10s")
    assert run["best_metric"] is None
    assert "| none" in stretto("simulate", "--study", study, "--policy", "asha", "--deadline", "10s")[1]


def test_diverged_trials_do_not_win(stretto: StudyCommand, tmp_path: Path) -> None:
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
    stretto: StudyCommand, study: Path, tmp_path: Path
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
        (["--profiles", "."], "--profiles applies to workloads"),
        (["--gpu-type", "t4"], "--gpu-type applies to workloads"),
        (["--nodes", "3"], "--nodes applies to workloads"),
        (["--gpus-per-node", "4"], "--gpus-per-node applies to workloads"),
        (["--interval", "60s"], "--interval applies to workloads"),
        (["--restart", "30s"], "--restart applies to workloads"),
        (["--rounds"], "--rounds applies to workloads"),
        (["--no-whole-seconds"], "--whole-seconds applies to workloads"),
        (["--interference", "0"], "--interference applies to workloads"),
        (["--noise", "0"], "--noise applies to workloads"),
        (["--priors"], "--priors applies to workloads"),
        (["--jobs", "3"], "--jobs applies to workloads"),
        (["--hours", "3"], "--hours applies to workloads"),
        (["--log-start", "3h"], "--log-start applies to workloads"),
    ],
)
def test_wrong_flags_of_a_study_are_explained(
    stretto: StudyCommand, study: Path, words: list[str], said: str
) -> None:
    assert said in stretto.refused("simulate", "--study", study, *words)


@pytest.mark.parametrize("words", [["--deadline", "30m"], ["--seeds", "3"]])
def test_flags_of_a_study_need_one(stretto: StudyCommand, words: list[str]) -> None:
    assert "Add --study STUDY.toml" in stretto.refused("simulate", "builtin:demo", "--policy", "fifo", *words)


@pytest.mark.parametrize("policy", TUNING_POLICIES)
def test_a_tuning_policy_needs_a_study(stretto: StudyCommand, policy: str) -> None:
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
    stretto: StudyCommand, tmp_path: Path, old: str, new: str, said: str
) -> None:
    write(tmp_path / "curves.csv", curve_table({"a": ["0.5"] * 28}))
    write(tmp_path / "short.csv", curve_table({"a": ["0.5"] * 3}))
    text = edited(SMALL_STUDY, (f'curves = "{old}"', f'curves = "{new}"'))
    path = write(tmp_path / "study.toml", text)
    assert said in stretto.refused("simulate", "--study", path, "--policy", "asha")


def test_help_fits_a_screen_and_has_an_example(stretto: StudyCommand) -> None:
    for command in ("plan", "init", "simulate"):
        code, out, _ = stretto(command, "--help")
        assert code == 0
        assert len(out.splitlines()) <= 60
        assert "Example:" in out


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
    stretto: StudyCommand, tmp_path: Path, batch: int
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
