"""`plan` of a study whose speed nobody has written down: it is measured first."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from launching import planned, prepare
from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.driving.drive import RealSubstrate
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.substrate import TrainingSpec
from stretto.inputs.cluster import slots_offer
from stretto.inputs.profile import read_profile
from stretto.planning.profile import Latency
from stretto.profiling.probe_data import ProbeProgress
from stretto.runs.begin import begin
from stretto.runs.folder import RunFolder, RunSpec
from stretto.search.space import Config
from study_command import StudyCommand, write
from tune_world import STUDY, TRAIN, TRUTH, Endless, endless, write_study

UNKNOWN = STUDY[: STUDY.index("[profile]")].replace("slots = 2", "slots = 2\nusd_per_slot_hour = 3.6")
CLUSTER = """
[cluster]
max_nodes = 8
queue_s = 5
init_s = 20
[[cluster.instance]]
name = "two"
gpus = 2
usd_per_hour = 7.2
"""


@pytest.fixture
def stretto(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> StudyCommand:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.cli.plan.study_to_plan", partial(planned, make=endless))
    return StudyCommand(monkeypatch, capsys)


def test_it_is_measured_and_planned_for_this_machine(stretto: StudyCommand, tmp_path: Path) -> None:
    study = write_study(tmp_path, UNKNOWN)
    code, out, err = stretto("plan", study, "train.py:train", "--deadline", "20m")
    assert code == 0, err
    assert "measuring on this machine, 90 s at most once it trains: " in err
    assert "2 slots, of this machine" in err
    assert "slot" in out
    found = stretto.json("plan", study, "train.py:train", "--deadline", "20m")
    assert found["cost_usd"]["mean"] == pytest.approx(0.001 * _slot_seconds(found), rel=0.5)
    assert max(stage["nodes"] for stage in found["stages"]) <= 2


def _slot_seconds(found: dict[str, object]) -> float:
    """What all epochs of the plan take with one worker each."""
    stages = found["stages"]
    assert isinstance(stages, list)
    epochs = sum(
        stage["trials"] * (stage["last_epoch"] - stage["first_epoch"] + 1)
        + stage["trials"] * TRUTH.start_s / TRUTH.latency.epoch_s
        for stage in stages
    )
    return float(epochs * TRUTH.latency.epoch_s)


class OneFails(Endless):
    """The first configuration fails as soon as it is started."""

    def __init__(self, training: TrainingSpec, folder: RunFolder) -> None:
        super().__init__(training)
        self._folder = folder
        self._bad: Config | None = None
        self._failing: set[str] = set()
        self._to_come: list[Event] = []

    def admit(self, job: Job) -> None:
        self._bad = job.config if self._bad is None else self._bad
        if job.config == self._bad:
            self._failing.add(job.id)
        else:
            super().admit(job)

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            if one.job_id not in self._failing:
                super().apply([one])
            elif one.action is Action.START:
                log = self._folder.log(one.job_id)
                log.parent.mkdir(parents=True)
                log.write_text("what it printed")
                error = "Traceback\nValueError: odd"
                event = JobFailed(t_s=self.now_s(), job_id=one.job_id, error=error, log=str(log))
                self._to_come.append(event)

    def next_event(self, until_s: float) -> Event | None:
        return self._to_come.pop(0) if self._to_come else super().next_event(until_s)


def one_fails(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
    del clock
    return OneFails(training, folder)


def test_a_configuration_that_failed_is_told_with_its_error_and_its_log(
    stretto: StudyCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = write_study(tmp_path, UNKNOWN)
    monkeypatch.setattr("stretto.cli.plan.study_to_plan", partial(planned, make=one_fails))
    code, _, err = stretto("plan", study, "train.py:train")
    assert code == 0, err
    (told,) = (line for line in err.splitlines() if "failed" in line)
    assert re.fullmatch(
        r"1 of 2 configurations failed when tried, the first with lr = [\d.e-]+: ValueError: odd; "
        r"log: runs/tiny/failed\.log",
        told,
    )
    assert Path("runs/tiny/failed.log").read_text() == "what it printed"
    checked = check_request(TuneRequest(study=study, work="train.py:train", deadline_s=900.0))
    assert told in prepare(checked, make=endless).speeds, "also where it was measured before"


def test_what_was_measured_once_serves_again_and_serves_tune(stretto: StudyCommand, tmp_path: Path) -> None:
    study = write_study(tmp_path, UNKNOWN)
    stretto("plan", study, "train.py:train")
    code, _, err = stretto("plan", study, "train.py:train", "--deadline", "1h")
    assert code == 0
    assert "measuring" not in err
    assert "runs/tiny/profile.json" in err
    said: list[ProbeProgress] = []
    checked = check_request(TuneRequest(study=study, work="train.py:train", deadline_s=900.0))
    prepare(checked, make=endless, on_progress=said.append)
    assert not said


def test_it_is_measured_for_the_run_that_is_named(stretto: StudyCommand, tmp_path: Path) -> None:
    study = write_study(tmp_path, UNKNOWN)
    code, _, err = stretto("plan", study, "train.py:train", "--name", "mine")
    assert code == 0
    assert "runs/mine/profile.json" in err
    said: list[ProbeProgress] = []
    checked = check_request(TuneRequest(study=study, work="train.py:train", name="mine"))
    prepare(checked, make=endless, on_progress=said.append)
    assert not said


def test_the_entry_or_command_may_be_in_the_file(stretto: StudyCommand, tmp_path: Path) -> None:
    study = write_study(tmp_path, UNKNOWN.replace("trials = 6", 'trials = 6\nentry = "train.py:train"'))
    assert stretto("plan", study)[0] == 0
    write(study, UNKNOWN.replace("trials = 6", 'trials = 6\ncommand = ["python", "train.py", "{lr}"]'))
    code, _, err = stretto("plan", study)
    assert code == 0
    assert "measuring" in err, "another training is measured anew"


def test_a_study_for_a_cluster_is_planned_for_it_with_the_speeds_seen_here(
    stretto: StudyCommand, tmp_path: Path
) -> None:
    study = write_study(tmp_path, UNKNOWN + CLUSTER)
    code, out, err = stretto("plan", study, "train.py:train", "--deadline", "20m")
    assert code == 0, err
    assert "measured on this machine" in err
    assert "assumed to hold" in err
    assert "two" in out
    request = TuneRequest(study=study, work="train.py:train", policy="rubberband")
    tuning = planned(request, make=endless).file.tuning
    assert tuning.max_nodes == 8
    assert (tuning.profile.queue_s.mean, tuning.profile.init_s.mean) == (5.0, 20.0)
    assert tuning.profile.latency.node_sd > 0, "nodes elsewhere may differ from this one and each other"
    assert tuning.profile.latency.epoch_s == pytest.approx(TRUTH.latency.epoch_s, rel=0.2)


def test_the_profile_of_another_training_under_the_same_name_is_not_taken(
    stretto: StudyCommand, tmp_path: Path
) -> None:
    study = write_study(tmp_path, UNKNOWN)
    stretto("plan", study, "train.py:train")
    checked = check_request(TuneRequest(study=study, work="train.py:train"))
    begin(checked.folder, _spec(checked))
    assert stretto("plan", study, "train.py:train")[0] == 0
    told = stretto.refused("plan", study, "--", "python", "train.py", "{lr}")
    assert "runs/tiny: holds a run of" in told
    assert "another name" in told


def _spec(checked: CheckedStudy) -> RunSpec:
    offer = slots_offer(2, checked.outline.machine)
    return RunSpec(kind="tune", started_at_s=0.0, asked=checked.asked, slots=2, offer=offer)


def test_what_is_there_already_is_not_measured(stretto: StudyCommand, tmp_path: Path) -> None:
    study = write_study(tmp_path)
    for words in (("train.py:train",), ("--name", "mine"), ("--store", "there")):
        assert "there is nothing to measure" in stretto.refused("plan", study, *words)
    code, _, err = stretto("plan", study)
    assert code == 0
    assert err == ""
    assert not Path("runs").exists()
    write(study, STUDY + CLUSTER)
    for words in (("--on", "ray:nowhere:1"), ("--slots", "2")):
        told = stretto.refused("plan", study, *words)
        assert "the plan is for [cluster], and there is nothing to measure" in told


def test_a_plan_for_another_number_of_slots(stretto: StudyCommand, tmp_path: Path) -> None:
    study = write_study(tmp_path)
    few, many = (stretto.json("plan", study, "--slots", slots) for slots in ("1", "8"))
    assert max(stage["nodes"] for stage in few["stages"]) == 1
    assert many["jct_s"]["mean"] < few["jct_s"]["mean"]
    assert "0 slots are out of range" in stretto.refused("plan", study, "--slots", "0")


@pytest.mark.usefixtures("stretto")
def test_a_command_without_checkpoints_is_planned_with_one_slot_for_each_trial(tmp_path: Path) -> None:
    command = 'trials = 6\ncommand = ["python", "train.py", "{lr}"]'
    study = write_study(tmp_path, UNKNOWN.replace("trials = 6", command))
    for more, most in (("", 1), ("\ncheckpoints = true", 2)):
        write(study, UNKNOWN.replace("trials = 6", command + more))
        found = planned(TuneRequest(study=study, policy="rubberband"), make=endless)
        assert found.file.tuning.profile.scaling.most_gpus == most
        assert any("checkpoints = true" in note for note in found.notes) == (most == 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "nothing says what to measure"),
        (("train.py:trian",), "Did you mean train?"),
        (("train.py",), "does not name a training function"),
        (("--", "no-such-program", "{lr}"), "is not a program"),
    ],
)
def test_nonsense_is_told_before_anything_runs(
    stretto: StudyCommand, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    assert told in stretto.refused("plan", write_study(tmp_path, UNKNOWN), *words)
    assert not Path("runs").exists()


def test_limits_of_the_file_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path, UNKNOWN + '[limits]\ndeadline = "30m"\nq = 0.8\n')
    request = TuneRequest(study=study, work="train.py:train", policy="rubberband")
    limits = planned(request, make=endless).file.tuning.limits
    assert (limits.deadline_s, limits.q) == (1800.0, 0.8)
    with pytest.raises(InputError, match="not above 0"):
        planned(dataclasses.replace(request, deadline_s=-1.0), make=endless)


def test_a_real_training_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = StudyCommand(monkeypatch, capsys)
    study = write_study(tmp_path, UNKNOWN)
    write(tmp_path / "train.py", TRAIN)
    code, out, err = command("plan", study, "train.py:train", "--deadline", "10m", "--json")
    assert code == 0, err
    assert json.loads(out)["jct_s"]["mean"] > 0
    measured = read_profile(Path("runs/tiny/profile.json"))
    assert measured.epochs
    assert all(one.epoch_s >= 4 * 0.01 / 2 for one in measured.epochs), "its steps sleep"


def test_a_training_without_an_epoch_is_refused_and_leaves_no_profile(
    stretto: StudyCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tune_world.TRUTH", dataclasses.replace(TRUTH, latency=Latency(epoch_s=1e5)))
    said = stretto.refused("plan", write_study(tmp_path, UNKNOWN), "train.py:train", "--deadline", "1h")
    assert "the first epoch did not end within 7m 30s" in said
    assert "--time 5m" not in said
    assert "an eighth for the end of an epoch (5 and 10 minutes without a deadline). Give a later" in said
    assert "a command prints" not in said
    assert not list(tmp_path.rglob("profile.json"))


def test_a_near_deadline_bounds_the_wait_for_a_sign_of_training(
    stretto: StudyCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tune_world.TRUTH", dataclasses.replace(TRUTH, latency=Latency(epoch_s=1e5)))
    said = stretto.refused("plan", write_study(tmp_path, UNKNOWN), "train.py:train", "--deadline", "200s")
    waited_s = re.search(r"the first epoch did not end within (\d)m (\d\d)s", said)
    assert waited_s is not None
    assert 60 < 60 * int(waited_s[1]) + int(waited_s[2]) <= 150


def test_epochs_may_be_longer_than_a_probe(
    stretto: StudyCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tune_world.TRUTH", dataclasses.replace(TRUTH, latency=Latency(epoch_s=400.0)))
    study = write_study(tmp_path, UNKNOWN)
    code, _, err = stretto("plan", study, "train.py:train", "--deadline", "12h")
    assert code == 0, err
    assert read_profile(Path("runs/tiny/profile.json")).epoch_times_s(1) == pytest.approx([400.0], rel=0.3)
