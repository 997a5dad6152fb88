"""`tune`, `run`, `explain`, `report` as a user meets them: what they print, and what they say to nonsense."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from stretto import tune
from stretto.core.errors import InputError
from stretto.core.events import Decided, JobReported
from stretto.core.instructions import Action
from stretto.inputs.jobs import read_jobs
from stretto.runs.folder import RunFolder
from study_command import StudyCommand, write
from tune_world import SCRIPT, STUDY, write_study

COMMAND = """\
import json, sys
for epoch in range(1, 9):
    print(json.dumps({"epoch": epoch, "accuracy": 1.0 - abs(float(sys.argv[1])) / epoch}), flush=True)
"""


@pytest.fixture
def stretto(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> StudyCommand:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return StudyCommand(monkeypatch, capsys)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write(tmp_path / "command.py", COMMAND)
    return write_study(tmp_path)


WITHOUT_EPOCHS = """\
import json, sys, time
for epoch in range(1, 9):
    time.sleep(0.05)
    print(json.dumps({"accuracy": epoch + 1e-6 * float(sys.argv[1])}), flush=True)
"""


class TestNonsense:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("none.toml", "train.py:train"), "cannot be read"),
            (("study.toml",), "study.toml: nothing says what to train"),
            (("study.toml", "train.py"), "does not name a training function"),
            (("study.toml", "none.py:train"), "cannot be read"),
            (("study.toml", "train.py:trian"), "Did you mean train?"),
            (("study.toml", "broken.py:train"), "line 1 is not Python"),
            (("study.toml", "narrow.py:train"), "does not take config and run"),
            (("study.toml", "train.py:train", "--slots", -1), "-1 slots are out of range"),
            (("study.toml", "train.py:train", "--slots", 0), "0 slots are out of range"),
            (("study.toml", "train.py:train", "--name", "a/b"), "cannot be the name of a run"),
            (("study.toml", "train.py:train", "--name", ".."), "cannot be the name of a run"),
            (("study.toml", "train.py:train", "--retries", -1), "-1 retries are less than none"),
            (("study.toml", "train.py:train", "--deadline", "0s"), "not later than the start"),
            (("study.toml", "train.py:train", "--budget", "much"), "not a sum of money"),
            (("study.toml", "train.py:train", "--policy", "hypershed"), "there is no policy"),
            (("study.toml", "train.py:train", "--policy", "asha,sha"), "a run has one policy"),
            (("study.toml", "train.py:train", "--set", "asha.eta=3"), "a policy that is not run"),
            (("study.toml", "--", "no-such-program", "{lr}"), "is not a program"),
            (("study.toml", "--", sys.executable, "train.py", "{rl}"), "{rl}"),
        ],
    )
    def test_it_is_told_what_is_wrong(
        self, stretto: StudyCommand, study: Path, words: tuple[object, ...], told: str
    ) -> None:
        write(study.parent / "broken.py", "def train(:\n")
        write(study.parent / "narrow.py", "def train(config):\n    pass\n")
        assert told in stretto.refused("tune", *words)
        assert not Path("runs").exists()

    def test_money_needs_somebody_who_agrees(self, stretto: StudyCommand, study: Path) -> None:
        write(study, STUDY.replace("slots = 2", "slots = 2\nusd_per_slot_hour = 3"))
        code, _, err = stretto("tune", study, "train.py:train", "--deadline", "1m")
        assert code == 2
        assert "$3 an hour" in err
        assert "--yes" in err
        assert not Path("runs/tiny/spec.json").exists()

    def test_a_study_without_a_space(self, stretto: StudyCommand, study: Path) -> None:
        write(study, STUDY.replace("lr = { log = [1e-4, 1.0] }", ""))
        assert "names no hyperparameters" in stretto.refused("tune", study, "train.py:train")

    @pytest.mark.parametrize("command", ["explain", "report"])
    def test_a_run_that_is_not_there(self, stretto: StudyCommand, study: Path, command: str) -> None:
        del study
        assert "there is no run 'tiny'" in stretto.refused(command, "tiny")


@pytest.mark.processes
def test_a_command_that_begins_anew_shows_no_epoch_it_did_not_train(
    stretto: StudyCommand, study: Path
) -> None:
    write(study.parent / "command.py", WITHOUT_EPOCHS)
    words = ("tune", study, "--policy", "asha", "--", sys.executable, "command.py", "{lr}")
    code, _, err = stretto(*words)
    assert code == 0, err
    events = list(RunFolder(Path("runs/tiny")).events())
    starts = Counter(
        one.job_id
        for event in events
        if isinstance(event, Decided)
        for one in event.instructions
        if one.action is Action.START
    )
    assert max(starts.values()) > 1, "somebody was paused"
    results = [one for event in events if isinstance(event, JobReported) for one in event.results]
    assert [one.epoch for one in results] == [int(one.value or 0) for one in results]


@pytest.mark.processes
def test_a_command_is_tuned_explained_and_reported(stretto: StudyCommand, study: Path) -> None:
    words = (
        "tune",
        study,
        "--policy",
        "asha",
        "--deadline",
        "2m",
        "--",
        sys.executable,
        "command.py",
        "{lr}",
    )
    code, out, err = stretto(*words)
    assert code == 0, err
    assert "every trial ended" in out
    assert "trial-000 started" in err
    again, shown, _ = stretto(*words)
    assert again == 0
    assert shown == out[out.index("tiny under asha") :]
    found = stretto.json("report", "tiny")
    assert found["ended_by"] == "jobs"
    assert found["best_config"]["lr"] == min(trial["config"]["lr"] for trial in found["trials"])
    story = stretto.json("explain", "tiny")
    assert {job["id"] for job in story["jobs"]} == {trial["id"] for trial in found["trials"]}
    one = stretto.json("explain", "tiny", found["best_trial"])
    assert [line["what"] for line in one["lines"] if line["what"].startswith("epoch ")][:2] == [
        "epoch 1",
        "epoch 2",
    ]
    assert any("slot" in line["text"] for line in one["lines"])
    assert not any("GPU" in line["text"] for line in one["lines"]), "slots may be cores"
    assert "has no job 'x'" in stretto.refused("explain", "tiny", "x")


@pytest.mark.processes
def test_another_policy_under_the_same_name_is_refused(stretto: StudyCommand, study: Path) -> None:
    command = ("--", sys.executable, "command.py", "{lr}")
    stretto("tune", study, "--policy", "asha", *command)
    told = stretto.refused("tune", study, "--policy", "sha", *command)
    assert 'policy was "asha" and is "sha"' in told
    assert "a new --name" in told


def test_the_entry_may_be_written_in_the_file(stretto: StudyCommand, study: Path) -> None:
    write(study, STUDY.replace("trials = 6", 'trials = 6\nentry = "other.py:train"'))
    assert "other.py cannot be read" in stretto.refused("tune", study)
    write(study, STUDY.replace("trials = 6", f'trials = 6\ncommand = ["{sys.executable}", "{{x}}"]'))
    assert "{x}" in stretto.refused("tune", study)


class TestRun:
    JOBS = """
[[job]]
name = "one"
command = [{python!r}, "command.py", "{{lr}}"]
epochs = 8
config = {{ lr = 0.5 }}
[[job]]
name = "two"
command = [{python!r}, "failing.py"]
epochs = 8
"""

    @pytest.mark.processes
    def test_a_failure_shows_its_own_words_and_its_log(self, stretto: StudyCommand, study: Path) -> None:
        write(study.parent / "failing.py", "raise ValueError('oh no')\n")
        jobs = write(study.parent / "jobs.toml", self.JOBS.format(python=sys.executable))
        code, out, _ = stretto("run", jobs, "--policy", "fifo", "--slots", 2, "--retries", 0)
        assert code == 1
        assert "ValueError: oh no" in out
        assert "jobs/two/stdout.log" in out
        found = stretto.json("run", jobs, "--policy", "fifo", "--slots", 2, "--retries", 0, code=1)
        assert {job["id"]: job["state"] for job in found["jobs"]} == {"one": "finished", "two": "failed"}
        assert "| one " in stretto("explain", "jobs")[1]

    @pytest.mark.parametrize(
        ("old", "new", "told"),
        [
            ('name = "two"', 'name = "one"', "'one' is there twice"),
            ('name = "two"', 'name = "a/b"', "no slashes"),
            ("epochs = 8\nconfig", "config", "epochs is missing"),
            ("epochs = 8\nconfig", "epochs = 8\nweight = 2\nconfig", "'weight' is not known here"),
            ("epochs = 8\nconfig", "epochs = 8\nsubmit_at = 'soon'\nconfig", "not a duration"),
            ("epochs = 8\nconfig", "epochs = 8\ngpus = { min = 3, max = 2 }\nconfig", "from 3"),
            ("epochs = 8\nconfig", "epochs = 8\ngpus = { min = 9 }\nconfig", "it needs at least 9 slots"),
            (
                "epochs = 8\nconfig",
                "epochs = 8\nbatch = { per_gpu = [9, 1] }\nconfig",
                "the least and the most",
            ),
            ("epochs = 8\nconfig", "epochs = 8\nentry = 'train.py:train'\nconfig", "one of the two"),
        ],
    )
    def test_nonsense_in_the_file(
        self, stretto: StudyCommand, study: Path, old: str, new: str, told: str
    ) -> None:
        write(study.parent / "failing.py", SCRIPT)
        text = self.JOBS.format(python=sys.executable)
        assert text.count(old) == 1
        jobs = write(study.parent / "jobs.toml", text.replace(old, new))
        assert told in stretto.refused("run", jobs, "--slots", 2)

    def test_a_policy_that_tunes_is_refused(self, stretto: StudyCommand, study: Path) -> None:
        write(study.parent / "failing.py", SCRIPT)
        jobs = write(study.parent / "jobs.toml", self.JOBS.format(python=sys.executable))
        assert "tunes a study" in stretto.refused("run", jobs, "--policy", "asha")


def test_init_writes_jobs_that_read(stretto: StudyCommand, study: Path) -> None:
    del study
    code, out, _ = stretto("init", "jobs")
    assert code == 0
    assert "stretto run jobs.toml" in out
    assert [job.name for job in read_jobs("jobs.toml").jobs] == ["small", "large"]
    stretto("init", "jobs", "two.toml")
    assert "stretto run two.toml" in Path("two.toml").read_text(encoding="utf-8")
    assert "runs/two/jobs/small" in Path("two.toml").read_text(encoding="utf-8")


@pytest.mark.processes
def test_json_is_json_and_nothing_else(stretto: StudyCommand, study: Path) -> None:
    code, out, _ = stretto(
        "tune", study, "--policy", "asha", "--json", "--", sys.executable, "command.py", "{lr}"
    )
    assert code == 0
    found = json.loads(out)
    assert found["elsewhere"]["policy"] == "hypersched"
    assert found["trials_by_state"]


@pytest.mark.processes
def test_the_python_api_has_the_same_powers(
    stretto: StudyCommand, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del stretto
    monkeypatch.chdir(study.parent)
    work = [sys.executable, "command.py", "{lr}"]
    result = tune(study, work, policy="asha", deadline="2m", name="api", folder="elsewhere")
    assert result.succeeded
    assert result.run == Path("elsewhere/api")
    assert tune(study, work, policy="asha", deadline="2m", name="api", folder="elsewhere") == result
    with pytest.raises(InputError, match="at_deadline"):
        tune(study, work, at_deadline="never")


@pytest.mark.parametrize("command", ["tune", "run", "explain", "report"])
def test_help_fits_a_screen_and_has_an_example(stretto: StudyCommand, study: Path, command: str) -> None:
    del study
    code, out, _ = stretto(command, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 45
    assert f"Example: stretto {command} " in out


def test_help_is_broken_where_the_terminal_ends(
    stretto: StudyCommand, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del study
    monkeypatch.setenv("COLUMNS", "80")
    out = stretto("tune", "--help")[1]
    assert "checkpoint. All files are in runs/NAME. The same command resumes a run" in out
    assert "Example: stretto tune study.toml train.py:train --deadline 10m  " in out
