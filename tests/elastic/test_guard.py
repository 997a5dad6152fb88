"""The guard's part in the metrics file: it adds lines, and reads what others add."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.substrate.elastic.guard import LineBuffer, MetricsFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def opened(path: Path) -> MetricsFile:
    return MetricsFile(str(path), ["epoch"])


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_that_others_add_are_seen_once_and_whole(path: Path) -> None:
    metrics = opened(path)
    assert list(metrics.added()) == []
    add(path, '{"epoch": 1}\n{"epo')
    assert list(metrics.added()) == [b'{"epoch": 1}']
    add(path, 'ch": 2}\n')
    assert list(metrics.added()) == [b'{"epoch": 2}']
    assert list(metrics.added()) == []


def test_what_was_there_before_is_not_new_but_can_be_had(path: Path) -> None:
    add(path, '{"epoch": 1}\n')
    metrics = opened(path)
    assert list(metrics.before()) == [b'{"epoch": 1}']
    add(path, '{"epoch": 2}\n')
    assert list(metrics.added()) == [b'{"epoch": 2}']


def test_reports_are_kept_between_the_lines_of_others_and_not_seen_again(path: Path) -> None:
    metrics = opened(path)
    add(path, '{"epoch": 1}\n')
    assert list(metrics.keep(b'{"epoch": 2}')) == [b'{"epoch": 1}']
    assert list(metrics.keep(b'{"other": 3}')) == []
    assert list(metrics.keep(b"{no json")) == []
    add(path, '{"epoch": 3}\n')
    assert list(metrics.added()) == [b'{"epoch": 3}']
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_file_that_is_begun_anew_or_replaced_is_read_from_its_beginning(path: Path) -> None:
    metrics = opened(path)
    add(path, '{"epoch": 1, "note": "long"}\n')
    assert len(list(metrics.added())) == 1
    path.write_text('{"epoch": 2}\n')
    assert list(metrics.added()) == [b'{"epoch": 2}']
    new = path.with_suffix(".new")
    new.write_text('{"epoch": 2}\n{"epoch": 3}\n')
    new.replace(path)
    assert list(metrics.added()) == [b'{"epoch": 2}', b'{"epoch": 3}']


def test_a_file_that_cannot_be_had_is_no_matter(tmp_path: Path) -> None:
    metrics = opened(tmp_path / "not" / "there")
    assert list(metrics.added()) == []
    assert list(metrics.keep(b'{"epoch": 1}')) == []
    (tmp_path / "not").mkdir()
    assert list(metrics.keep(b'{"epoch": 2}')) == []
    assert (tmp_path / "not" / "there").read_text() == '{"epoch": 2}\n'
    assert list(metrics.added()) == []


@given(st.lists(st.text(alphabet="ab{} ", max_size=6), max_size=8), st.integers(1, 5))
def test_lines_are_the_same_however_they_are_cut(texts: list[str], size: int) -> None:
    stream = "".join(text + "\n" for text in texts).encode()
    lines = LineBuffer()
    found = [line for at in range(0, len(stream), size) for line in lines.add(stream[at : at + size])]
    assert found == [text.strip().encode() for text in texts]
