"""Lines of a command that make no sense: never an exception, never a wrong count, and said in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.allocation import BatchChoice, on_nodes
from stretto.substrate.elastic.command_output import (
    MOST_EPOCHS,
    CommandSetup,
    EpochMark,
    Progress,
    Reading,
    Trial,
    read_report,
)

JOB = CommandSetup("a", on_nodes({"0": 1}), BatchChoice(16))
TRIAL = CommandSetup("a", on_nodes({"0": 1}), BatchChoice(16), Trial("accuracy", 10))


def read_all(setup: CommandSetup, *lines: str | bytes) -> tuple[Progress, list[Reading]]:
    progress, mark, readings = Progress(), EpochMark(), []
    for at, line in enumerate(lines):
        text = line.encode() if isinstance(line, str) else line
        reading = read_report(text, setup, progress, t_s=float(at), mark=mark)
        mark = reading.mark
        if reading.report is not None:
            progress = progress.after(reading.report)
        readings.append(reading)
    return progress, readings


@pytest.mark.parametrize(
    "epoch", ["1e308", "1e10", "-1", "1.5", "NaN", "Infinity", "true", '"3"', str(10**400)]
)
@pytest.mark.parametrize("setup", [JOB, TRIAL])
def test_an_epoch_that_makes_no_sense_does_not_count_and_is_told(setup: CommandSetup, epoch: str) -> None:
    line = f'{{"epoch": {epoch}, "loss": 1, "accuracy": 0.5}}'
    progress, (first, then) = read_all(setup, line, '{"epoch": 1, "loss": 1, "accuracy": 0.5}')
    assert "epoch is" in first.wrong
    assert str(MOST_EPOCHS) in first.wrong
    assert progress.epoch == 1
    assert then.wrong == ""


@pytest.mark.parametrize("setup", [JOB, TRIAL])
def test_epochs_that_count_down_do_not_take_the_count_back(setup: CommandSetup) -> None:
    lines = [f'{{"epoch": {epoch}, "loss": 1, "accuracy": 0.5}}' for epoch in (5, 4, 3)]
    progress, readings = read_all(setup, *lines)
    assert progress.epoch == 5
    assert "epoch 4 came after epoch 5" in readings[1].wrong
    assert readings[2].problems == readings[1].problems, "the log says it once"


def test_a_start_may_begin_anew() -> None:
    last = Progress(work_done=5.0, epoch=5)
    reading = read_report(b'{"epoch": 1}', JOB, last, t_s=0.0, mark=EpochMark())
    assert reading.report is not None
    assert (reading.report.epoch, reading.wrong) == (1, "")


def test_a_metric_too_large_for_a_number_is_no_result_and_told() -> None:
    _, (reading,) = read_all(TRIAL, f'{{"epoch": 1, "accuracy": {10**400}}}')
    assert reading.report is not None
    assert [one.value for one in reading.report.results] == [None]
    assert "too large for a number" in reading.wrong


@pytest.mark.parametrize(
    "line",
    [
        b'{"epoch": 1, "accuracy": "\xff\xfe"}',
        b'{"epoch": ' + b"[" * 60000 + b"}",
        b'{"epoch": 1' + b"0" * 5000 + b"}",
        b'{"epoch": 1, "epoch": 2, "accuracy": NaN}',
        b'{"epoch": null, "accuracy": "\\ud800"}',
        b"\x00{}",
    ],
)
@pytest.mark.parametrize("setup", [JOB, TRIAL])
def test_garbage_is_passed_over(setup: CommandSetup, line: bytes) -> None:
    progress, _ = read_all(setup, line)
    assert progress.epoch in {0, 2}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["epoch", "accuracy", "loss", "work_done"]), _VALUES), max_size=6
    )
)
def test_whatever_is_printed_the_count_of_a_start_never_falls(values: list[dict[str, object]]) -> None:
    for setup in (JOB, TRIAL):
        progress, mark = Progress(), EpochMark()
        for at, value in enumerate(values):
            line = json.dumps(value).encode()
            reading = read_report(line, setup, progress, t_s=float(at), mark=mark)
            mark = reading.mark
            if reading.report is not None:
                assert progress.epoch <= reading.report.epoch <= MOST_EPOCHS
                progress = progress.after(reading.report)
