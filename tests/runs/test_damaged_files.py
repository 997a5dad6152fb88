"""Files of a run that are not as they were written: a sentence, never a traceback."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import finished, prepare, start
from stretto.core.errors import InputError
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.inputs.profile import MeasuredProfile, TimedEpoch, read_profile, write_profile
from stretto.runs.folder import RunFolder
from stretto.runs.metrics_files import metrics_after, reported_metrics
from stretto.runs.results import tune_result
from stretto.system.plain_json import MOST_DEPTH, UnreadableError, parse_json, read_json
from stretto.wire.checkpoints import (
    FORMAT,
    META_FILE,
    STATE_FILE,
    CheckpointMeta,
    meta_text,
    usable_checkpoints,
)
from study_command import StudyCommand
from tune_world import STUDY, endless, simulated, write_study

DAMAGES = {
    "empty": b"",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "rather deep": b"[" * 500 + b"]" * 500,
    "digits": b'{"kind": ' + b"9" * 10_000 + b"}",
    "many digits": b'{"kind": ' + b"9" * 4000 + b"}",
    "too large": b'{"kind": 1e400}',
    "not a number": b'{"kind": NaN}',
    "bytes": bytes(range(256)),
    "half a letter": b'{"kind": "\\ud800"}',
    "a list": b"[1, 2]",
    "null": b"null",
}
DAMAGED = pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())


@pytest.fixture
def stretto(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> StudyCommand:
    del here
    return StudyCommand(monkeypatch, capsys)


@pytest.fixture
def over(here: Path) -> CheckedStudy:
    checked = check_request(TuneRequest(study=write_study(here), work="train.py:train", policy="asha"))
    start(prepare(checked, make=simulated), make=simulated)
    return checked


@DAMAGED
def test_whatever_cannot_be_used_is_one_kind_of_error(content: bytes) -> None:
    if content in {b"[1, 2]", b"null"}:
        return
    with pytest.raises(UnreadableError):
        parse_json(content)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_unreadable(content: bytes) -> None:
    with contextlib.suppress(UnreadableError):
        json.dumps(parse_json(content), allow_nan=False).encode()


def test_depth_and_size_have_a_limit(tmp_path: Path) -> None:
    depth = MOST_DEPTH - 2
    assert parse_json("[" * depth + "]" * depth)
    assert parse_json("[1e400]", finite=False) == [float("inf")]
    (tmp_path / "a").write_text("[1, 2, 3]")
    with pytest.raises(UnreadableError, match="more than 5 bytes"):
        read_json(tmp_path / "a", most_bytes=5)


@pytest.mark.parametrize("name", ["spec", "result"])
def test_every_command_says_which_file_is_damaged(
    over: CheckedStudy, stretto: StudyCommand, name: str
) -> None:
    for content in DAMAGES.values():
        (over.folder.path / f"{name}.json").write_bytes(content)
        assert f"runs/tiny/{name}.json: " in stretto.refused("report", "tiny")
    for words in (("explain", "tiny"), ("tune", "study.toml", "train.py:train", "--policy", "asha")):
        code, _, err = stretto(*words)
        assert code in {0, 2}
        assert "Traceback" not in err


def test_a_damaged_forecast_is_said_and_ends_no_result(over: CheckedStudy, stretto: StudyCommand) -> None:
    for content in DAMAGES.values():
        (over.folder.path / "plan.json").write_bytes(content)
        code, out, _ = stretto("report", "tiny")
        assert code == 0
        assert "best accuracy" in out
        assert "runs/tiny/plan.json: " in out
    code, out, _ = stretto("tune", "study.toml", "train.py:train", "--policy", "asha")
    assert code == 0
    assert "best accuracy" in out


def test_so_is_a_damaged_measurement(here: Path, stretto: StudyCommand) -> None:
    file = write_study(here, STUDY[: STUDY.index("[profile]")])
    checked = check_request(TuneRequest(study=file, work="train.py:train", policy="asha"))
    start(prepare(checked, make=endless), make=simulated)
    checked.folder.profile.write_bytes(b"[" * 100_000)
    for words in (("report", "tiny"), ("tune", "study.toml", "train.py:train", "--policy", "asha")):
        code, out, _ = stretto(*words)
        assert code == 0
        assert "best accuracy" in out
        assert "runs/tiny/profile.json: is not JSON" in out


def test_a_changed_byte_of_a_profile_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    measured = MeasuredProfile(
        what="train.py:train",
        slots=2,
        configs=({"lr": 0.1},),
        epochs=(TimedEpoch(config=0, workers=1, epoch_s=2.5, first=False),),
        speeds=(),
        examples=1000,
        measured_s=10.0,
        warm_up_s=None,
        starts_s=(1.5,),
        resizes_s=(),
        speed=None,
        not_measured=(),
    )
    write_profile(path, measured)
    whole = path.read_bytes()
    assert read_profile(path) == measured
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with contextlib.suppress(InputError):
            assert read_profile(path) == measured
    fields = json.loads(whole)
    del fields["check"]
    fields["epochs"][0]["epoch_s"] = 3.0
    path.write_text(json.dumps(fields))
    assert read_profile(path).epochs[0].epoch_s == 3.0, "whoever changes it on purpose removes the line"


def test_a_changed_byte_of_a_folders_file_is_seen(over: CheckedStudy) -> None:
    for name in ("spec", "plan", "result"):
        path = over.folder.path / f"{name}.json"
        whole, read = path.read_bytes(), over.folder.read(name)
        for place in range(0, len(whole), 1 if len(whole) < 200 else 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with contextlib.suppress(InputError):
                assert over.folder.read(name) == read
        path.write_bytes(whole)


def test_files_of_version_0_1_have_no_checksum_and_are_read(over: CheckedStudy) -> None:
    for name in ("spec", "plan", "result"):
        tables = over.folder.read(name)
        (over.folder.path / f"{name}.json").write_text(json.dumps(tables, indent=1))
        assert over.folder.read(name) == tables
    assert finished(over) is not None


@DAMAGED
def test_a_profile_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(InputError, match="stretto profile"):
        read_profile(tmp_path / "profile.json")


@DAMAGED
def test_a_line_of_metrics_is_passed_over(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics("a").parent.mkdir(parents=True)
    folder.metrics("a").write_bytes(
        b'{"epoch": 1, "loss": 0.5}\n' + content + b'\n{"epoch": 2, "loss": 0.4}\n'
    )
    assert reported_metrics(folder).epochs == 2
    assert metrics_after(folder, "a", 2) == {"loss": 0.4}


def save(folder: Path, number: int, *, best: bool) -> Path:
    place = folder / f"{number:08d}"
    place.mkdir(parents=True)
    meta = CheckpointMeta(format=FORMAT, progress=float(number), best=best, size_bytes=4, sha256=64 * "a")
    (place / META_FILE).write_text(meta_text(meta))
    (place / STATE_FILE).write_text("1234")
    return place


def test_a_damaged_checkpoint_does_not_end_a_studys_result(over: CheckedStudy, stretto: StudyCommand) -> None:
    best = tune_result(over.folder, None).best_trial
    assert best is not None
    folder = over.folder.checkpoints(best)
    older, newer = save(folder, 3, best=True), save(folder, 5, best=True)
    for content in DAMAGES.values():
        (newer / META_FILE).write_bytes(content)
        code, out, err = stretto("report", "tiny")
        assert (code, "Traceback" in err) == (0, False)
        assert str(older / STATE_FILE) in out
        assert f"checkpoint {newer}: meta.json" in out
        assert "00000003 is used instead." in out
    assert len(stretto.json("report", "tiny")["damaged"]) == 1


def test_a_state_that_was_cut_short_is_not_named_either(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1, best=False), save(tmp_path, 2, best=True)
    (newer / STATE_FILE).write_text("12")
    save(tmp_path, 3, best=True).rename(tmp_path / "00000003.corrupt")
    found = usable_checkpoints(tmp_path)
    assert (found.best, found.newest) == (None, older / STATE_FILE)
    assert found.damaged == (
        f"{tmp_path / '00000003.corrupt'}: it was found damaged and set aside",
        f"{newer}: state.pt has 2 bytes instead of 4",
    )
