"""What was measured for one run of a study serves another, if nothing that can be seen has changed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import prepare
from made_up_site import MadeUpCluster
from stretto.core.errors import InputError
from stretto.driving.local_target import ThisMachine
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.target import node_of
from stretto.inputs.profile import MeasuredProfile, ProbedNode, read_profile, write_profile
from stretto.inputs.work import CommandLine, Entry
from stretto.launch.tune import StudyLaunch
from stretto.profiling.launched_node import instance_to_probe
from stretto.profiling.origin import LARGE, code_files, known_profile, node_to_launch, origin_of
from stretto.profiling.probe_data import ProbeProgress
from study_command import StudyCommand
from tune_world import STUDY, endless, write_study

UNKNOWN = STUDY[: STUDY.index("[profile]")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, UNKNOWN)
    return tmp_path


def asked(name: str | None = None, work: str | tuple[str, ...] = "train.py:train") -> CheckedStudy:
    return check_request(TuneRequest(study=Path("study.toml"), work=work, name=name))


def is_measured(checked: CheckedStudy) -> bool:
    """Whether a run is measured when it is prepared."""
    said: list[ProbeProgress] = []
    prepare(checked, make=endless, on_progress=said.append)
    return bool(said)


def edit(path: str, old: str, new: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    assert old in text
    Path(path).write_text(text.replace(old, new), encoding="utf-8")


def test_a_run_of_another_name_takes_what_was_measured_for_the_first() -> None:
    assert is_measured(asked())
    first, other = asked(), asked("other")
    assert not is_measured(other)
    assert read_profile(other.folder.profile) == read_profile(first.folder.profile)
    assert not is_measured(asked("third"))


def test_it_is_said_where_speeds_are_from() -> None:
    said = [prepare(asked(name), make=endless).speeds for name in (None, None, "other", "other")]
    assert said[0] == "Speeds: measured now (runs/tiny/profile.json)."
    assert said[1] == "Speeds: measured before for this run (runs/tiny/profile.json)."
    assert said[2].startswith(
        "Speeds: measured before for the run tiny (runs/tiny/profile.json), with the same"
    )
    assert said[3] == "Speeds: measured before for this run (runs/other/profile.json)."
    write_study(Path(), STUDY)
    assert prepare(asked("known"), make=endless).speeds == "Speeds: as [profile] of study.toml says."


def test_tune_prints_it_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThisMachine, "make", lambda _, *given: endless(*given))
    monkeypatch.setattr(StudyLaunch, "start", stopped)
    prepare(asked(), make=endless)
    _, _, err = StudyCommand(monkeypatch, capsys)("tune", "study.toml", "train.py:train", "--name", "b")
    (line,) = [line for line in err.splitlines() if line.startswith("Speeds: ")]
    assert "the run tiny (runs/tiny/profile.json)" in line


CHANGES: dict[str, Callable[[], None]] = {
    "the script": lambda: edit("train.py", "pass", "return"),
    "what it may import": lambda: Path("model.py").touch(),
    "the space": lambda: edit("study.toml", "1e-4", "1e-3"),
    "the study": lambda: edit("study.toml", "max_epochs = 8", "max_epochs = 9"),
    "the slots": lambda: edit("study.toml", "slots = 2", "slots = 3"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_is_measured_anew(what: str) -> None:
    prepare(asked(), make=endless)
    CHANGES[what]()
    assert is_measured(asked("other"))


def test_limits_may_change() -> None:
    prepare(asked(), make=endless)
    write_study(Path(), UNKNOWN + '[limits]\ndeadline = "1h"\n')
    assert not is_measured(asked("other"))


def test_another_training_is_measured_anew() -> None:
    prepare(asked(), make=endless)
    assert is_measured(asked("other", ("python", "train.py", "{lr}")))


@pytest.mark.parametrize("name", [None, "other"])
def test_another_machine_is_measured_anew(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    prepare(asked(), make=endless)
    monkeypatch.setattr("stretto.profiling.origin.platform.node", lambda: "elsewhere")
    assert is_measured(asked(name))


def test_a_changed_script_is_measured_anew_also_under_the_same_name() -> None:
    prepare(asked(), make=endless)
    edit("train.py", "pass", "return")
    assert is_measured(asked())


def test_a_profile_that_does_not_say_what_it_is_of_serves_its_own_run_only() -> None:
    prepare(asked(), make=endless)
    path = asked().folder.profile
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields["origin"], fields["check"]
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert not is_measured(asked())
    assert is_measured(asked("other"))


def test_a_damaged_profile_of_another_run_is_passed_over_and_the_newest_taken() -> None:
    for number, name in enumerate(("old", "new")):
        prepare(asked(name), make=endless)
        os.utime(asked(name).folder.profile, (number, number))
    damaged = asked("damaged").folder.profile
    damaged.parent.mkdir()
    damaged.write_text("{", encoding="utf-8")
    assert "the run new (" in prepare(asked("other"), make=endless).speeds


def measured_on(checked: CheckedStudy, target: MadeUpCluster, **fields: object) -> MeasuredProfile:
    """As a probe there leaves it in the run's folder."""
    prepare(asked("probe"), make=endless)
    profile = dataclasses.replace(
        read_profile(asked("probe").folder.profile),
        what=f"{checked.work} on Ray",
        slots=2,
        origin=origin_of(checked, target),
    )
    profile = dataclasses.replace(profile, **fields)  # type: ignore[arg-type]
    write_profile(checked.folder.profile, profile)
    return profile


def test_of_a_cluster_that_was_started_anew_only_its_own_run_believes_it() -> None:
    """Names of nodes are new then, and nothing else tells one cluster from another."""
    clusters = ((node_of("a", 2),), (node_of("b", 2),))
    first, again = (MadeUpCluster(slots=2, there=nodes, idle=nodes) for nodes in clusters)
    measured_on(asked(), first)
    assert known_profile(asked(), again) is not None
    assert known_profile(asked("other"), first) is not None
    assert known_profile(asked("other"), again) is None


def test_a_node_that_was_launched_to_measure_on_is_paid_for_once() -> None:
    target, other = MadeUpCluster(slots=2, there=()), asked("other")
    node = ProbedNode(instance="slot", queue_s=1.0, init_s=2.0, cost_usd=3.0)
    assert node_to_launch(other, target) == instance_to_probe(target.offer)
    measured_on(asked(), target, node=node, slots=1)
    assert node_to_launch(other, target) is None
    known = known_profile(other, target)
    assert known is not None
    assert known.taken_over().node == dataclasses.replace(node, cost_usd=0.0)


def test_a_damaged_profile_of_its_own_is_told_with_what_helps() -> None:
    prepare(asked(), make=endless)
    asked().folder.profile.write_text("{", encoding="utf-8")
    with pytest.raises(
        InputError, match=r"profile\.json: is not JSON.* Remove it, and the training is measured"
    ):
        prepare(asked(), make=endless)
    asked().folder.profile.unlink()
    assert is_measured(asked())


def test_the_files_of_a_command_are_those_it_names() -> None:
    Path("data").write_bytes(b"x")
    words = ("python", "train.py", "--data", "data", "{lr}", "x" * 5000, "a\0b")
    assert [path.name for path in code_files(CommandLine(words))] == ["data", "train.py"]
    assert code_files(Entry(Path("train.py"), "train")) == [Path("train.py").absolute()]


def test_large_files_are_told_apart_without_reading_them() -> None:
    words, target = ("python", "train.py", "data"), ThisMachine(slots=2)
    codes = set()
    for changed_s in (1, 2):
        with Path("data").open("wb") as file:
            file.truncate(LARGE + 1)
        os.utime("data", (changed_s, changed_s))
        codes.add(origin_of(asked("other", words), target).code)
    assert len(codes) == 2


def within(deadline_s: float) -> CheckedStudy:
    return check_request(TuneRequest(study=Path("study.toml"), work="train.py:train", deadline_s=deadline_s))


def test_a_probe_that_was_cut_short_is_made_again_where_it_may_take_much_longer() -> None:
    assert is_measured(within(600.0))
    assert read_profile(asked().folder.profile).cut_short
    assert not is_measured(within(600.0))
    assert not is_measured(within(300.0))
    assert not is_measured(within(700.0)), "it would not see much more"
    short = dataclasses.replace(read_profile(asked().folder.profile), given_s=2.0)
    write_profile(asked().folder.profile, short)
    assert is_measured(within(600.0))
    for enough in (
        dataclasses.replace(short, cut_short=False),
        dataclasses.replace(short, given_s=None),
        dataclasses.replace(short, origin=None),
    ):
        write_profile(asked().folder.profile, enough)
        assert not is_measured(within(600.0))


def test_it_is_said_that_only_a_worker_alone_was_timed() -> None:
    assert "idle" not in prepare(asked(), make=endless).speeds
    path = asked().folder.profile
    measured = read_profile(path)
    lone = tuple(dataclasses.replace(one, lone=True) for one in measured.epochs if one.workers == 1)
    write_profile(path, dataclasses.replace(measured, epochs=lone, speeds=()))
    assert "only while the other slots were idle" in prepare(asked(), make=endless).speeds


def test_a_profile_that_tells_nothing_of_epochs_is_not_kept_to() -> None:
    prepare(asked(), make=endless)
    path = asked().folder.profile
    write_profile(path, dataclasses.replace(read_profile(path), epochs=(), speeds=()))
    assert is_measured(asked())
    assert read_profile(path).epochs


def test_what_was_timed_with_one_slot_does_not_serve_trials_that_may_have_more() -> None:
    request = TuneRequest(study=Path("study.toml"), work=("python3", "train.py", "{lr}"))
    rigid = check_request(request)
    elastic = check_request(dataclasses.replace(request, checkpoints=True))
    assert is_measured(rigid)
    assert read_profile(rigid.folder.profile).worker_counts == (1,)
    assert not is_measured(rigid)
    assert is_measured(elastic)
    assert read_profile(elastic.folder.profile).worker_counts == (1, 2)
    assert not is_measured(rigid), "who has timed more has timed enough"
