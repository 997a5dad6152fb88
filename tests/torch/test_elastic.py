"""Groups that change while they train: the result does not, and nothing is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_processes import SUPPORT
from stretto.wire.messages import (
    Ack,
    BatchOrder,
    Described,
    Failed,
    Finished,
    FinishEpoch,
    Formed,
    Left,
    Park,
    Report,
    Saved,
    SetBatch,
)
from torch_gang import Cradle, Gang

ENTRY = f"{SUPPORT / 'elastic_train.py'}:train"
EPOCHS = 6
NAP_S = 0.01


def losses(gang: Gang) -> list[float]:
    ends = gang.epoch_ends()
    return [ends[epoch].values["loss"] for epoch in sorted(ends)]


@pytest.fixture(scope="module")
def cradle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    with Cradle(ENTRY, tmp_path_factory.mktemp("cradle")) as cradle:
        yield cradle


def gang_of(cradle: Cradle, folder: Path, **config: Any) -> Gang:
    return Gang(
        cradle, folder, config={"epochs": EPOCHS, "nap_s": NAP_S, "seen": str(folder / "seen"), **config}
    )


@pytest.fixture(scope="module")
def undisturbed(cradle: Cradle, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What one worker reaches when nobody interferes."""
    with gang_of(cradle, tmp_path_factory.mktemp("plain"), nap_s=0.0) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.wait("w0", Finished)
        return losses(gang)


def assert_seen_once(folder: Path) -> set[int]:
    """Every example of every epoch exactly once; how many workers there were along the way."""
    by_epoch: dict[int, list[int]] = {}
    sizes = set()
    for line in (folder / "seen").read_text().splitlines():
        epoch, workers, index = json.loads(line)
        by_epoch.setdefault(epoch, []).extend(index)
        sizes.add(workers)
    assert sorted(by_epoch) == list(range(EPOCHS))
    for epoch, seen in by_epoch.items():
        assert sorted(seen) == list(range(500)), f"epoch {epoch}"
    return sizes


def test_resizes_change_neither_the_result_nor_what_is_seen(
    cradle: Cradle, tmp_path: Path, undisturbed: list[float]
) -> None:
    with gang_of(cradle, tmp_path) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        gang.wait("w0", Report, lambda report: report.epoch >= 2)
        gang.spawn("w2")
        gang.form("w1", "w2")  # the leader goes, a follower takes over
        assert gang.end("w0") == 0
        assert gang.wait("w0", Left).why == "not part of the next group"
        gang.form("w1")
        gang.wait("w1", Finished)
        assert gang.end("w1") == gang.end("w2") == 0
        assert losses(gang) == pytest.approx(undisturbed, abs=1e-5)
    assert assert_seen_once(tmp_path) == {1, 2}


def test_a_parked_run_goes_on_where_it_was(cradle: Cradle, tmp_path: Path, undisturbed: list[float]) -> None:
    with gang_of(cradle, tmp_path) as gang:
        gang.spawn("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        gang.wait("w0", Report, lambda report: report.epoch >= 1)
        gang.tell("w0", Park())
        assert gang.wait("w0", Left) == Left("parked", saved=True)
        assert gang.end("w0") == gang.end("w1") == 0
        gang.trained.clear()
        gang.spawn("w2")
        gang.form("w2")
        gang.wait("w2", Finished)
        assert losses(gang) == pytest.approx(undisturbed, abs=1e-5)
    assert_seen_once(tmp_path)


def interrupted_epochs(folder: Path) -> set[int]:
    """Those that were trained by one worker and by two: none if they changed between two epochs."""
    workers: dict[int, set[int]] = {}
    for line in (folder / "seen").read_text().splitlines():
        epoch, there, _ = json.loads(line)
        workers.setdefault(epoch, set()).add(there)
    return {epoch for epoch, seen in workers.items() if len(seen) > 1}


def test_an_interrupted_epoch_is_not_timed(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.wait("w0", Report, lambda report: report.epoch >= 1)
        gang.spawn("w1")
        gang.form("w0", "w1")
        gang.wait("w0", Finished)
        untimed = {epoch - 1 for epoch, end in gang.epoch_ends().items() if end.epoch_s is None}
        assert untimed == interrupted_epochs(tmp_path)
        speeds = [
            sample
            for message in gang.members["w0"].said
            if isinstance(message, Report)
            for sample in message.speeds
        ]
        assert {sample.workers for sample in speeds} == {1, 2}
        assert {sample.atomic for sample in speeds} == {48, 24}
        assert all(0 <= sample.sync_s <= sample.step_s for sample in speeds)


def test_the_peers_of_a_killed_worker_leave(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path, epochs=200) as gang:
        gang.spawn("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        gang.wait("w0", Report)
        gang.kill("w1")
        assert gang.wait("w0", Left).why == "peer lost"
        assert gang.end("w0") == 0


def test_without_a_controller_workers_save_and_leave(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path, epochs=200) as gang:
        gang.spawn("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        gang.wait("w0", Report)
        for member in gang.members.values():
            assert member.channel is not None
            member.channel.close()
        assert gang.end("w0") == gang.end("w1") == 0
    assert list((tmp_path / "checkpoints").glob("*/state.pt"))


def test_a_failure_is_told_with_the_users_traceback(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path, fails_at=1, failed=str(tmp_path / "failed")) as gang:
        gang.spawn("w0")
        gang.form("w0")
        failed = gang.wait("w0", Failed)
        assert "the disk of the user's cat is full" in failed.traceback
        assert "elastic_train.py" in failed.traceback
        assert gang.end("w0") == 1


def test_a_trial_waits_for_the_decision_on_its_epoch(cradle: Cradle, tmp_path: Path) -> None:
    with Gang(cradle, tmp_path, config={"epochs": EPOCHS}, waits_for_ack=True, metric="accuracy") as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.wait("w0", Report, lambda report: report.epoch == 1)
        time.sleep(0.2)
        assert max(gang.epoch_ends()) == 1
        gang.tell("w0", Ack(1))
        gang.wait("w0", Report, lambda report: report.epoch == 2)
        gang.tell("w0", Park())
        assert gang.wait("w0", Left).saved
        assert max(gang.epoch_ends()) == 2
        assert gang.wait("w0", Saved, lambda saved: saved.best).progress >= 1.0


def test_an_epoch_can_be_finished_before_leaving(cradle: Cradle, tmp_path: Path) -> None:
    with gang_of(cradle, tmp_path) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.tell("w0", FinishEpoch())
        assert gang.wait("w0", Left).saved
        assert len(gang.epoch_ends()) >= 1
        assert gang.wait("w0", Saved).progress == max(gang.epoch_ends())


@pytest.mark.parametrize("adam", [False, True])
def test_an_adaptive_run_takes_the_batch_it_is_told(cradle: Cradle, tmp_path: Path, adam: bool) -> None:
    with gang_of(cradle, tmp_path, adaptive=True, adam=adam, epochs=20, nap_s=0.0) as gang:
        gang.spawn("w0")
        gang.spawn("w1")
        gang.form("w0", "w1", batch=BatchOrder(24, 0))
        described = gang.wait("w0", Described)
        assert (described.examples, described.batch, described.adaptive) == (500, 48, True)
        gang.wait("w0", Report, lambda report: report.epoch >= 1)
        gang.tell("w0", SetBatch(BatchOrder(24, 1)))
        gang.wait("w0", Finished)
        reports = [message for message in gang.members["w0"].said if isinstance(message, Report)]
        assert reports[-1].noise is not None
        assert reports[-1].noise.var > 0
        batches = {
            json.loads(line)["batch"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        }
        assert batches == {48, 96}
        assert reports[-1].progress == pytest.approx(20.0, abs=0.3)


def test_what_would_be_trained_can_be_asked_for(cradle: Cradle, tmp_path: Path) -> None:
    with Gang(cradle, tmp_path, config={"epochs": 3}, describe_only=True) as gang:
        gang.spawn("w0")
        assert gang.wait("w0", Described).examples == 500
        assert gang.wait("w0", Left).why == "described"
        assert not any(isinstance(message, Formed) for message in gang.members["w0"].said)


def test_data_workers_keep_working_across_a_resize(
    cradle: Cradle, tmp_path: Path, undisturbed: list[float]
) -> None:
    with gang_of(cradle, tmp_path, num_workers=1) as gang:
        gang.spawn("w0")
        gang.form("w0")
        gang.spawn("w1")
        gang.form("w0", "w1")
        gang.wait("w0", Finished)
        assert losses(gang) == pytest.approx(undisturbed, abs=1e-5)
    assert_seen_once(tmp_path)
