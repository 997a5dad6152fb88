"""Loops that count steps, values that are kept, and workers that come to differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steps_train
from steps_train import BATCH, REPORT_EVERY, STEPS
from stretto.wire.messages import Described, Failed, Finished, Left, Park, Report
from torch_gang import Cradle, Gang

SCRIPT = Path(steps_train.__file__)


@pytest.fixture(scope="module")
def cradle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    with Cradle(f"{SCRIPT}:train", tmp_path_factory.mktemp("cradle")) as cradle:
        yield cradle


def gang_of(cradle: Cradle, folder: Path, function: str = "train", **task: Any) -> Gang:
    config = {"seen": str(folder / "seen"), "nap_s": 0.02}
    return Gang(cradle, folder, **{"entry": f"{SCRIPT}:{function}", "config": config} | task)


def rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


def losses(gang: Gang) -> list[dict[str, float]]:
    ends = gang.epoch_ends()
    return [ends[epoch].values for epoch in sorted(ends)]


@pytest.fixture(scope="module")
def undisturbed(cradle: Cradle, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("plain")
    with gang_of(cradle, folder, config={"seen": str(folder / "seen")}) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.wait("w0", Finished)
        described = gang.wait("w0", Described)
        assert (described.examples, described.batch) == (REPORT_EVERY * BATCH, BATCH)
        return losses(gang)


def test_counted_steps_go_on_across_resizes_and_restarts(
    cradle: Cradle, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    assert len(undisturbed) == STEPS // REPORT_EVERY
    with gang_of(cradle, tmp_path) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.spawn("w1")
        gang.spawn("w2")
        gang.form("w0", "w1")
        gang.wait("w0", Report, lambda report: report.epoch >= 1)
        gang.form("w1", "w0", "w2")
        gang.wait("w1", Report, lambda report: report.epoch >= 2)
        gang.tell("w1", Park())
        assert gang.wait("w1", Left) == Left("parked", saved=True)
        assert gang.end("w0") == gang.end("w2") == 0
        gang.trained.clear()
        gang.spawn("w3")
        gang.form("w3")
        gang.wait("w3", Finished)
        assert len(losses(gang)) == len(undisturbed)
        for mine, theirs in zip(losses(gang), undisturbed, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    *seen, end = rows(tmp_path)
    assert {row[2] for row in seen} == {1, 2, 3}
    assert sorted(number for row in seen for number in row[3]) == list(range(STEPS * BATCH))
    assert {(row[0], row[4]) for row in seen} == {(step, step / STEPS) for step in range(STEPS)}
    assert end == ["end", STEPS, 1.0, pytest.approx(undisturbed[-1]["best"], abs=1e-5)]


def test_epochs_of_a_task_bound_counted_steps(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path, epochs=2) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.wait("w0", Finished)
        assert sorted(gang.epoch_ends()) == [1, 2]
    assert rows(tmp_path)[-1][:3] == ["end", 2 * REPORT_EVERY, 1.0]


def test_a_counter_of_the_scripts_own_is_noticed_after_a_resize(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path, "counts_itself") as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.wait("w0", Report, lambda report: report.epoch >= 1)
        gang.spawn("w1")
        gang.form("w0", "w1")
        said = [gang.wait(name, Failed) for name in ("w0", "w1")]
        assert gang.end("w0") == gang.end("w1") == 1
    assert said[0] == said[1]
    assert said[0].final
    assert "learning rate of group 0: " in said[0].traceback
    assert " on rank 0, 0.001 on rank 1" in said[0].traceback
    assert "run.step" in said[0].traceback
    assert not [row for row in rows(tmp_path) if row[2] > 1]


def test_a_weight_that_one_worker_changes_is_noticed_though_the_error_is_caught(
    cradle: Cradle, tmp_path: Path
) -> None:
    with gang_of(cradle, tmp_path, "changes_weights") as gang:
        gang.spawn("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        said = [gang.wait(name, Failed) for name in ("w0", "w1")]
        assert gang.end("w0") == gang.end("w1") == 1
    assert said[0] == said[1]
    assert "a value of parameter 0.bias: " in said[0].traceback
    seen = rows(tmp_path)
    assert sorted(row for row in seen if row[0] == "caught") == [["caught", 0], ["caught", 1]]
    assert max(row[0] for row in seen if row[0] != "caught") <= 1


def test_code_that_draws_its_own_data_is_told_of_steps_after_one_epoch(
    cradle: Cradle, tmp_path: Path
) -> None:
    with gang_of(cradle, tmp_path, "draws_own_batches", describe_only=True) as gang:
        gang.spawn("w0")
        assert "loop over run.steps(n, batch_size=..)" in gang.wait("w0", Failed).traceback
