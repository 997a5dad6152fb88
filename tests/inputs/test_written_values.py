"""Values and names in files of users that could not be written down: refused before anything is."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.core.errors import InputError
from stretto.inputs.fields import is_folder_name
from stretto.inputs.jobs import read_jobs
from stretto.inputs.study import read_outline
from stretto.runs.folder import run_folder
from study_command import StudyCommand, write
from tune_world import STUDY

JOB = '[[job]]\nname = "{name}"\ncommand = ["true"]\nepochs = 1\nconfig = {{ {config} }}\n'
VALUES = {
    "lr = nan": "job[0].config.lr: nan is not a finite number. Give a number such as 0.1.",
    "lr = -inf": "job[0].config.lr: -inf is not a finite number",
    "lr = 1e400": "job[0].config.lr: inf is not a finite number",
    "a = 1, lr = [[nan]]": "job[0].config.lr[0][0]: nan is not a finite number",
    f"lr = {'9' * 4000}": "job[0].config.lr: a whole number has 13288 bits",
    f"lr = {'9' * 10_000}": "is not TOML: Exceeds the limit",
    "lr = 2026-01-31": 'job[0].config.lr: 2026-01-31 is a date or time. Write it as a text: "2026-01-31".',
    "lr = 18:00:00": "job[0].config.lr: 18:00:00 is a date or time",
    "lr = [1, 2]": "job[0].config: lr is [1, 2]. Values are numbers, texts, true and false.",
    f"lr = {'[' * 40}{']' * 40}": "are nested more than 30 deep",
    'lr = "a\\u0000b"': "has a NUL character",
}


@pytest.mark.parametrize(("config", "told"), VALUES.items(), ids=[text[:20] for text in VALUES])
def test_a_value_is_refused_in_one_sentence_that_names_its_key(
    tmp_path: Path, config: str, told: str
) -> None:
    file = write(tmp_path / "jobs.toml", JOB.format(name="a", config=config))
    with pytest.raises(InputError) as refused:
        read_jobs(file)
    assert told in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("value", ["choice = [0.1, nan]", "choice = [1e400]", "log = [1e-4, inf]"])
def test_of_a_study_too(tmp_path: Path, value: str) -> None:
    file = write(tmp_path / "study.toml", STUDY.replace("lr = { log = [1e-4, 1.0] }", f"lr = {{ {value} }}"))
    with pytest.raises(InputError, match=r"space\.lr\.\w+\[\d\]: (nan|inf) is not a finite number"):
        read_outline(file)


def test_nothing_is_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stretto = StudyCommand(monkeypatch, capsys)
    for name, config in (("a", "lr = nan"), ("語" * 100, "lr = 1")):
        write(tmp_path / "jobs.toml", JOB.format(name=name, config=config))
        assert "jobs.toml: job[0]." in stretto.refused("run", "jobs.toml")
    write(tmp_path / "jobs.toml", JOB.format(name="a", config="lr = 1"))
    assert "200 bytes" in stretto.refused("run", "jobs.toml", "--name", "é" * 150)
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.toml"]


@pytest.mark.parametrize("name", ["a", "é" * 100, "x" * 100, "a b", "-", "語" * 66])
def test_what_a_run_or_job_may_be_called(name: str) -> None:
    assert is_folder_name(name)
    assert run_folder(name).name == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0", "a\n", "x" * 101, "語" * 67, "a\udcff"])
def test_and_what_not(name: str) -> None:
    assert not is_folder_name(name)
    with pytest.raises(InputError, match="cannot be the name of a run: it names a folder"):
        run_folder(name)
