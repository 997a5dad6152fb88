"""The commands as a user meets them: what they print, and what they say to nonsense."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inputs import SNAPSHOT, WORKLOAD
from launching import prepare, start
from stretto import __version__
from stretto.driving.request import TuneRequest, check_request
from study_command import Stretto
from tune_world import STUDY, simulated, write_study

METRICS = {
    "policy", "workload", "jobs", "completed", "mean_jct_s", "median_jct_s", "p90_jct_s", "p99_jct_s",
    "makespan_s", "gpu_hours", "gpu_utilisation", "cpu_utilisation", "resize_share", "restarts_per_job",
    "worst_ftf", "decisions", "decision_ms_mean", "decision_ms_p95", "wall_s",
}  # fmt: skip


@pytest.fixture
def stretto(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Stretto:
    return Stretto(monkeypatch, capsys)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(WORKLOAD)
    return path


def test_simulate_prints_a_table_to_paste(stretto: Stretto, workload: Path) -> None:
    code, out, _ = stretto("simulate", workload, "--policy", "pollux,tiresias", "--nodes", 4)
    assert code == 0
    assert "| pollux " in out
    assert "| tiresias" in out
    assert "3/3" in out
    assert "\x1b" not in out


def test_simulate_json_has_every_documented_field(stretto: Stretto, workload: Path) -> None:
    code, out, _ = stretto("simulate", workload, "--policy", "fifo,optimus", "--json", "--rounds")
    runs = json.loads(out)["runs"]
    assert code == 0
    assert [run["policy"] for run in runs] == ["fifo", "optimus"]
    assert all(set(run) == METRICS for run in runs)
    assert all(run["completed"] == run["jobs"] == 3 for run in runs)
    assert runs[0]["cpu_utilisation"] is None


def test_same_seed_same_numbers(stretto: Stretto, workload: Path) -> None:
    def metrics() -> list[dict[str, object]]:
        _, out, _ = stretto("simulate", workload, "--policy", "pollux", "--json", "--noise", 0.1, "--seed", 7)
        timed = ("decision_ms_mean", "decision_ms_p95", "wall_s")
        return [
            {key: value for key, value in run.items() if key not in timed} for run in json.loads(out)["runs"]
        ]

    assert metrics() == metrics()


def test_report_is_written(stretto: Stretto, workload: Path, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.html"
    code, _, err = stretto("simulate", workload, "--policy", "fifo", "--report", report)
    assert code == 0
    assert str(report) in err
    assert report.stat().st_size > 1_000_000


def test_unfinished_jobs_make_the_exit_code_1(stretto: Stretto, workload: Path) -> None:
    code, out, _ = stretto(
        "simulate", workload, "--policy", "fifo", "--nodes", 1, "--gpus-per-node", 2, "--json"
    )
    assert code == 1
    run = json.loads(out)["runs"][0]
    assert run["completed"] < run["jobs"]
    assert run["makespan_s"] is None


def test_options_reach_the_policy(stretto: Stretto, workload: Path) -> None:
    _, low, _ = stretto("simulate", workload, "--policy", "tiresias", "--json")
    code, high, _ = stretto(
        "simulate", workload, "--policy", "tiresias", "--set", "tiresias.threshold_gpu_h=0.01", "--json"
    )
    assert code == 0
    assert json.loads(high)["runs"][0]["decisions"] != json.loads(low)["runs"][0]["decisions"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "polux"], "pollux"),
        (["--policy", ""], "names no policy"),
        (["--policy", "fifo,fifo"], "twice"),
        (["--policy", "fifo", "--set", "pollux.p=1"], "not run"),
        (["--policy", "pollux", "--set", "pollux.q=1"], "Its options: p,"),
        (["--policy", "pollux", "--set", "pollux.p=soft"], "a number"),
        (["--policy", "pollux", "--set", "pollux"], "POLICY.OPTION=VALUE"),
        (["--interval", "soon"], "not a duration"),
        (["--interval", "0"], "at least a second"),
        (["--noise", "1.5"], "below 1"),
        (["--interference", "-0.1"], "at least 0"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "1000000000"], "at most 100000"),
        (["--gpu-type", "rtx"], "--profiles"),
        (["--profiles", "nowhere"], "nowhere"),
    ],
)
def test_wrong_flags_are_explained(stretto: Stretto, workload: Path, words: list[str], said: str) -> None:
    code, out, err = stretto("simulate", workload, *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("source", ["builtin:nothing", "missing.csv", "."])
def test_workloads_that_are_not_there(stretto: Stretto, source: str) -> None:
    code, _, err = stretto("simulate", source)
    assert code == 2
    assert source in err


def test_decide_answers_as_documented(stretto: Stretto, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(SNAPSHOT))
    code, out, _ = stretto("decide", path, "--json")
    answer = json.loads(out)
    assert code == 0
    assert set(answer) == {"allocations", "batch", "reasons", "objective", "decision_ms"}
    assert set(answer["allocations"]) == {"one", "two"}
    assert answer["allocations"]["two"] in ({"a": 1}, {"b": 1})
    assert set(answer["batch"]) == {"one"}
    assert answer["reasons"]["two"]["code"] == "started"
    assert answer["objective"] > 0


@pytest.mark.parametrize("policy", ["pollux", "optimus", "tiresias", "drf", "tetris", "srtf", "fifo"])
def test_decide_with_every_policy(stretto: Stretto, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(SNAPSHOT))
    code, out, _ = stretto("decide", path, "--policy", policy)
    assert code == 0
    assert "one" in out
    assert "objective" in out


def test_decide_refuses_an_oracle(stretto: Stretto, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(SNAPSHOT))
    code, _, err = stretto("decide", path, "--policy", "optimus-oracle")
    assert code == 2
    assert "only a simulation knows" in err


def test_version_and_help(stretto: Stretto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert stretto("--version")[1].strip() == f"stretto {__version__}"
    for command in ([], ["simulate"], ["decide"]):
        code, out, _ = stretto(*command, "--help")
        assert code == 0
        assert len(out.splitlines()) <= 60
        assert "Example:" in out or not command


@pytest.mark.processes
def test_the_installed_command_starts(workload: Path) -> None:
    command = Path(sys.executable).with_name("stretto")
    done = subprocess.run(
        [command, "simulate", workload, "--policy", "nope"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no policy 'nope'.")


@pytest.mark.processes
def test_ctrl_c_while_python_imports_leaves_no_traceback() -> None:
    interrupted = """
import os, signal, sys
from stretto.cli.start import main

class Interrupt:
    def find_spec(self, name, *_):
        if name == "stretto.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
main()
"""
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert not done.stderr


ROOMS_OF_REAL_RUNS = ("stretto.launch", "stretto.driving", "stretto.torch", "torch", "ray")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("explain", "tiny"), 60),
        (("explain", "tiny", "trial-000"), 60),
        (("simulate", "--replay", "tiny", "--policy", "asha"), 110),
        (("simulate", "builtin:synthetic", "--jobs", "2", "--policy", "fifo"), 110),
    ],
)
def test_a_command_imports_only_what_it_needs(
    words: tuple[str, ...], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = TuneRequest(study=write_study(tmp_path, STUDY), work="train.py:train", policy="asha")
    start(prepare(check_request(request), make=simulated), make=simulated)
    lists = """
import sys
from stretto.cli.start import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", lists, *words], capture_output=True, text=True, check=False)
    loaded = done.stderr.split()
    ours = [name for name in loaded if name.split(".")[0] == "stretto"]
    assert done.returncode == 0, done.stderr
    assert len(ours) <= most, " ".join(sorted(ours))
    assert not [name for name in loaded if name.startswith(ROOMS_OF_REAL_RUNS)]
