"""`stretto profile` as a user meets it."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

import stretto.cli.profile
from stretto.cli.live import measuring
from stretto.cli.profile import profile_text
from stretto.core.observations import SpeedSample
from stretto.inputs.profile import MeasuredProfile, TimedEpoch, fit_speed, read_profile
from stretto.inputs.work import CommandLine, RealWork
from stretto.profiling.probe_data import ProbeProgress
from stretto.search.space import Config
from study_command import StudyCommand, write

TRAIN = "def train(config, run):\n    pass\n"
STUDY = """
[study]
name = "digits"
metric = "accuracy"
direction = "max"
trials = 5
entry = "train.py:train"
[halving]
rungs = [2]
eta = 2
max_epochs = 8
[space]
lr = { log = [1e-4, 1.0] }
[machine]
slots = 3
"""
SPEEDS = (SpeedSample(1, 1, 0, 64, 0.02, 0.0), SpeedSample(1, 2, 0, 32, 0.025, 0.005))


class Fake:
    """Stands for the probe: takes down what it was asked, and answers at once."""

    def __init__(self, two_workers_s: float = 2.5) -> None:
        self.work: RealWork | None = None
        self.configs: Sequence[Config] = ()
        self.asked: dict[str, Any] = {}
        self.two_workers_s = two_workers_s

    def __call__(self, work: RealWork, configs: Sequence[Config], **asked: Any) -> MeasuredProfile:
        self.work, self.configs, self.asked = work, configs, asked
        return MeasuredProfile(
            what=str(work),
            slots=asked["slots"],
            measured_s=12.0,
            configs=tuple(dict(config) for config in configs),
            epochs=(
                TimedEpoch(config=0, workers=1, epoch_s=2.0, first=False),
                TimedEpoch(config=0, workers=2, epoch_s=self.two_workers_s, first=False),
            ),
            speeds=SPEEDS,
            warm_up_s=7.0,
            starts_s=(0.5,),
            resizes_s=(),
            examples=None,
            speed=fit_speed(SPEEDS),
            not_measured=("a resize",),
        )


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(stretto.cli.profile, "probe", fake)
    return fake


@pytest.fixture
def stretto_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> StudyCommand:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write(tmp_path / "train.py", TRAIN)
    return StudyCommand(monkeypatch, capsys)


def test_it_prints_what_was_measured_and_writes_the_file(stretto_command: StudyCommand, probe: Fake) -> None:
    words = (
        "profile",
        "train.py:train",
        "--config",
        "lr=0.1",
        "--config",
        "name=x",
        "--slots",
        2,
        "--time",
        "1m",
    )
    code, out, err = stretto_command(*words)
    assert code == 0
    assert probe.configs == [(("lr", 0.1), ("name", "x"))]
    assert (probe.asked["slots"], probe.asked["time_s"]) == (2, 60.0)
    assert "2 workers are 0.80x as fast as one: more workers do not pay here." in out
    assert "Not measured, so plans leave room for it: a resize." in out
    assert "| 1 " in out
    assert "profile: profile.json" in err
    assert read_profile(Path("profile.json")).epoch_times_s(1) == [2.0]


def test_it_says_what_a_worker_alone_takes() -> None:
    usual = Fake()(CommandLine(("train",)), [()], slots=2)
    assert "While the other slots" not in profile_text(usual)
    lone = TimedEpoch(config=0, workers=1, epoch_s=1.5, first=False, lone=True)
    measured = replace(usual, epochs=(*usual.epochs, lone), lone_starts_s=(0.25,))
    assert "an epoch takes 0.75 times as long (1.5 s), and a start costs 0.25 s." in profile_text(measured)


def test_what_one_configuration_does_not_show_is_not_said() -> None:
    one = Fake()(CommandLine(("train",)), [()], slots=2)
    assert "between configurations" not in profile_text(one)
    two = replace(one, configs=({}, {}), epochs=(*one.epochs, replace(one.epochs[0], config=1, epoch_s=3.0)))
    assert "between configurations" in profile_text(two)


def test_a_model_through_two_points_is_not_judged() -> None:
    two = Fake()(CommandLine(("train",)), [()], slots=2)
    assert "too few points to judge" in profile_text(two)
    assert "error" not in profile_text(two)
    many = replace(two, speeds=tuple(SpeedSample(1, 1, 0, 8 * n, 0.001 * n, 0.0) for n in range(1, 6)))
    assert "too few points" not in profile_text(many)
    assert "error if left out" in profile_text(many)


def test_epochs_of_a_worker_alone_are_said_to_be_that() -> None:
    usual = Fake()(CommandLine(("train",)), [()], slots=2)
    lone = replace(usual, epochs=(replace(usual.epochs[0], lone=True),), lone_starts_s=(0.25,))
    text = profile_text(lone)
    assert "while the other slots were idle" in text
    assert "times as long" not in text


def test_a_time_is_the_longest_unless_none_is_given(stretto_command: StudyCommand, probe: Fake) -> None:
    stretto_command("profile", "train.py:train", "--time", "1m")
    assert (probe.asked["time_s"], probe.asked["first_epoch_s"]) == (60.0, 60.0)
    stretto_command("profile", "train.py:train")
    assert (probe.asked["time_s"], probe.asked["first_epoch_s"]) == (90.0, 600.0)


@pytest.mark.parametrize(("checkpoints", "workers"), [(False, 1), (True, None)])
def test_a_command_without_checkpoints_is_timed_with_one_worker(
    stretto_command: StudyCommand, probe: Fake, checkpoints: bool, workers: int | None
) -> None:
    kept = "checkpoints = true" if checkpoints else ""
    write(
        Path("study.toml"), STUDY.replace('entry = "train.py:train"', f'command = ["python3", "t"]\n{kept}')
    )
    assert stretto_command("profile", "--study", "study.toml")[0] == 0
    assert probe.asked["max_workers"] == workers


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            ProbeProgress(0.0, 0.125, "timing", "once it trains"),
            "measuring, 1 s at most once it trains: timing",
        ),
        (ProbeProgress(0.0, 450.0, "waiting", "in all"), "measuring, 450 s at most in all: waiting"),
    ],
)
def test_a_line_says_from_when_its_limit_counts_and_never_0_s(
    capsys: pytest.CaptureFixture[str], progress: ProbeProgress, line: str
) -> None:
    with measuring() as show:
        show(progress)
    assert capsys.readouterr().err == line + "\n"


def test_a_second_worker_that_pays_is_not_complained_about(
    stretto_command: StudyCommand, probe: Fake
) -> None:
    probe.two_workers_s = 1.2
    assert "do not pay" not in stretto_command("profile", "train.py:train", "--slots", 2)[1]


def test_json_is_the_file(stretto_command: StudyCommand, probe: Fake) -> None:
    printed = stretto_command.json("profile", "train.py:train", "--slots", 2, "--output", "here/p.json")
    assert printed == json.loads(Path("here/p.json").read_text())
    assert printed["format"] == "stretto-profile"
    assert probe.configs == [()]


def test_a_study_gives_entry_configurations_and_slots(stretto_command: StudyCommand, probe: Fake) -> None:
    write(Path("study.toml"), STUDY)
    assert stretto_command("profile", "--study", "study.toml")[0] == 0
    assert probe.asked["slots"] == 3
    assert len(set(probe.configs)) == 5
    assert all(1e-4 <= dict(config)["lr"] <= 1.0 for config in probe.configs)  # type: ignore[operator]
    assert str(probe.work).endswith("train.py:train")
    assert probe.asked["study"].metric == "accuracy"


def test_any_command_can_be_probed(stretto_command: StudyCommand, probe: Fake) -> None:
    words = ("profile", "--config", "lr=0.1", "--slots", 1, "--", "python3", "train.py", "--lr", "{lr}")
    assert stretto_command(*words)[0] == 0
    assert str(probe.work) == "python3 train.py --lr {lr}"


REFUSED = {
    "nothing to train": ((), "nothing says what to train"),
    "no file": (("other.py:train",), "cannot be read"),
    "no function": (("train.py:tran",), "Did you mean train?"),
    "no assignment": (("train.py:train", "--config", "lr"), "assigns nothing"),
    "not finite": (("train.py:train", "--config", "lr=NaN"), "not finite"),
    "no slots": (("train.py:train", "--slots", "0"), "0 slots"),
    "a store": (("train.py:train", "--store", "there"), "keeps no checkpoints"),
    "time": (("train.py:train", "--time", "soon"), "not a duration"),
    "folder": (("train.py:train", "--output", "."), "is a folder"),
    "place": (("train.py:train", "--output", "train.py/p.json"), "train.py is not a folder"),
    "file alone": (("train.py",), "does not name a training function"),
    "placeholder": (("--config", "lr=1", "--", "python3", "x", "{lrr}"), "stands for nothing"),
    "both": (("--config", "lr=1", "--study", "study.toml"), "Keep one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_with_a_sentence(stretto_command: StudyCommand, probe: Fake, case: str) -> None:
    write(Path("study.toml"), STUDY)
    words, said = REFUSED[case]
    assert said in stretto_command.refused("profile", *words)
    assert probe.work is None, "nothing was measured in vain"


def test_what_went_wrong_with_which_file_is_told(
    stretto_command: StudyCommand, probe: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/digits.npy")

    del probe
    monkeypatch.setattr(stretto.cli.profile, "probe", fail)
    code, _, err = stretto_command("profile", "train.py:train")
    assert code == 1
    assert err == "error: /data/digits.npy: No such file or directory.\n"


@pytest.mark.parametrize(
    ("resumes", "told"),
    [
        (False, "stopped while measuring; nothing was begun."),
        (True, "stopped before the run continued; nothing has changed."),
    ],
)
def test_ctrl_c_while_measuring_says_what_was_begun(
    capsys: pytest.CaptureFixture[str], resumes: bool, told: str
) -> None:
    def measure() -> None:
        with measuring(" on ray", resumes=resumes) as show:
            show(ProbeProgress(1.0, 90.0, "timing a start"))
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        measure()
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.splitlines() == [
        "measuring on ray, 90 s at most: timing a start",
        told,
    ]
