"""Some spoilt files of every kind, answered or refused without a traceback; benchmarks/fuzz.py has 50,000."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fuzz_inputs import (
    JOBS,
    LINES,
    LONGEST_SENTENCE,
    RICH_SNAPSHOT,
    STUDY,
    Jobs,
    Kind,
    Output,
    Snapshots,
    Studies,
    Subject,
    Tables,
    Tried,
    fuzz,
    try_it,
    wrong_with_sentence,
)
from inputs import SNAPSHOT
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.errors import InputError, StrettoError
from stretto.inputs.jobs import read_jobs
from stretto.inputs.snapshot import read_snapshot
from stretto.substrate.elastic.command_output import CommandSetup, EpochMark, Progress, Trial, read_report

NUMBERS = {
    Kind.SNAPSHOT: 200,
    Kind.TOML: 300,
    Kind.CSV: 150,
    Kind.LINES: 100,
    Kind.META: 100,
    Kind.JOURNAL: 40,
    Kind.OTHERS: 45,
}
JOB = '[[job]]\nname = "{name}"\nepochs = 1\ncommand = ["true"]\nconfig = {{ lr = {lr} }}\n'


@pytest.mark.processes
@pytest.mark.parametrize("kind", NUMBERS)
def test_spoilt_files_are_answered_or_refused(kind: Kind, tmp_path: Path) -> None:
    tried = [one for _, one in fuzz(kind, NUMBERS[kind], seed=1, folder=tmp_path)]
    assert [one.problem for one in tried if one.problem] == []
    assert any(not one.refused for one in tried)


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        (Studies(), STUDY),
        (Jobs(), JOBS),
        (Snapshots(), json.dumps(RICH_SNAPSHOT)),
        *((Tables(), table) for table in Tables.SEEDS),
        *((Output(), line) for line in LINES),
    ],
)
def test_what_is_not_spoilt_is_accepted(subject: Subject, text: str, tmp_path: Path) -> None:
    assert try_it(subject, text.encode(), tmp_path, random.Random(0)) == Tried(refused=False)


class Broken:
    """A reader that does what none may."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def spoil(self, chance: random.Random) -> bytes:
        del chance
        return b""

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        del data, folder, chance
        raise self._error

    def command(self, data: bytes, folder: Path) -> list[str]:
        del data, folder
        return []


@pytest.mark.parametrize(
    "error", [KeyError("a"), RecursionError(), RuntimeWarning("overflow"), ValueError("")]
)
def test_a_traceback_or_warning_is_a_problem(error: Exception, tmp_path: Path) -> None:
    assert type(error).__name__ in try_it(Broken(error), b"", tmp_path, random.Random(0)).problem


def test_an_error_that_nobody_can_read_is_a_problem() -> None:
    assert wrong_with_sentence("")
    assert wrong_with_sentence("a\x00b")
    assert wrong_with_sentence("a" * (LONGEST_SENTENCE + 1))
    assert not wrong_with_sentence("cluster.json: jobs is missing.")


def test_errors_can_be_printed_whatever_a_file_has_in_it() -> None:
    error = InputError(f"\ud800 and \x00 and {'x' * 100_000} are wrong.", where="a\nb")
    assert wrong_with_sentence(str(error)) == ""
    assert "(100000 characters)" in str(error)
    assert "\\ud800 and \\x00" in str(error)
    assert str(StrettoError("a plain word é")) == "a plain word é"


@pytest.mark.parametrize("lr", ["nan", "inf", "-inf", "1e400", "2020-01-01", "07:00:00", "[1]", str(2**63)])
def test_a_config_takes_finite_numbers(lr: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOB.format(name="a", lr=lr))
    with pytest.raises(InputError, match=r"config"):
        read_jobs(tmp_path / "jobs.toml")


def test_a_name_of_a_job_fits_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(JOB.format(name="é" * 50, lr=1), encoding="utf-8")
    (tmp_path / read_jobs(path).jobs[0].name).mkdir()
    path.write_text(JOB.format(name="中" * 100, lr=1), encoding="utf-8")
    with pytest.raises(InputError, match="bytes"):
        read_jobs(path)


@pytest.mark.parametrize(("parameters", "value"), [("perf_params", 1e308), ("grad_params", 1e300)])
def test_numbers_that_overflow_are_refused(parameters: str, value: float, tmp_path: Path) -> None:
    snapshot: dict[str, Any] = json.loads(json.dumps(SNAPSHOT))
    snapshot["jobs"][0][parameters][0] = value
    (tmp_path / "cluster.json").write_text(json.dumps(snapshot))
    with pytest.raises(InputError, match=parameters):
        read_snapshot(tmp_path / "cluster.json")


@pytest.mark.parametrize("subject", [Snapshots(), Studies(), Jobs()])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, "a." * 100_000 + "b = 1", '{"a":' * 100_000, "x" * 10**6, ""]
)
def test_deep_and_long_files_are_refused_in_time(
    subject: Snapshots | Studies | Jobs, text: str, tmp_path: Path
) -> None:
    tried = try_it(subject, text.encode(), tmp_path, random.Random(0))
    assert (tried.refused, tried.problem) == (True, "")


def _read(line: str, trial: Trial | None = None, mark: EpochMark | None = None) -> Any:
    setup = CommandSetup("a", on_nodes({"0": 1}), BatchChoice(16), trial)
    return read_report(line.encode(), setup, Progress(result_epoch=5), t_s=9.0, mark=mark or EpochMark())


@pytest.mark.parametrize("epoch", ["1e308", str(10**400), "1000001", "-1", "0.5", '"3"', "[1]"])
def test_an_epoch_that_is_none_is_left_out_and_said(epoch: str) -> None:
    reading = _read(f'{{"epoch": {epoch}, "work_done": 3}}')
    assert reading.report.epoch == 0
    assert "must be a whole number from 0 to 1000000" in reading.problems[0]


def test_epochs_that_count_down_are_said() -> None:
    reading = _read('{"epoch": 4, "loss": 1}', Trial("loss", 10), EpochMark(epoch=5, t_s=1.0))
    assert reading.report.results == ()
    assert "epochs count up, and epoch 4 came after epoch 5" in reading.wrong


def test_a_restarted_command_may_go_through_epochs_again() -> None:
    reading = _read('{"epoch": 1, "loss": 1}', Trial("loss", 10), EpochMark())
    assert reading.wrong == ""
