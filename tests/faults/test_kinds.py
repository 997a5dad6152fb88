"""Some of most kinds of faults over a running study; `benchmarks/faults.py` has five hundred."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from fault_inject import Disturbed, Kind, Supply
from fault_judge import problems
from fault_study import lay_out
from local_theatre import Theatre
from stretto.core.events import CheckpointSaved, JobRetried
from stretto.core.instructions import Action
from stretto.torch.persistence import Persistence, SavingSettings
from stretto.wire.messages import EpochEnd, Report, Saved

TRIALS = 5
EPOCHS = 16
FAULTS = [
    *(Kind.WORKER, Kind.STOP, Kind.RAISE, Kind.CHECKPOINT, Kind.META, Kind.DISK, Kind.NAN),
    *(Kind.NURSERY, Kind.CONTROLLER, Kind.JOURNAL, Kind.WORKER, Kind.CHECKPOINT, Kind.RAISE),
]


def test_a_study_comes_to_its_end_whatever_happens(tmp_path: Path) -> None:
    lay_out(tmp_path, trials=TRIALS, epochs=EPOCHS, nap_s=0.04, epoch_s=0.4)
    kinds = random.Random(0).sample(FAULTS, len(FAULTS))
    study = Disturbed(tmp_path, "hypersched", 0)
    study.live(Supply(kinds), within_s=300.0)
    assert sorted(fault.kind for fault in study.faults) == sorted(kinds)
    assert [*study.problems, *problems(study, trials=TRIALS, epochs=EPOCHS)] == []


def test_a_checkpoint_is_progress_though_its_epoch_was_told_before() -> None:
    """Of a job that lost what it had told, as the disk was full."""
    theatre = Theatre(slots=1)
    theatre.started(1)
    ends = tuple(EpochEnd(epoch=epoch, values={}, epoch_s=1.0) for epoch in (1, 2, 3))
    theatre.say(theatre.placed()[0], Report(progress=3.0, epoch=3, steps=30, ends=ends))
    for progress in (0.5, 1.0, 1.5, 1.5):
        theatre.say(theatre.placed()[0], Saved(progress=progress, path="checkpoint"))
        theatre.die(theatre.placed()[0])
        theatre.cooperate()
    attempts = [event.attempt for event in theatre.events if isinstance(event, JobRetried)]
    assert attempts == [1, 1, 1, 2]


def test_what_a_stopped_job_was_saving_is_told() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    (worker,) = theatre.placed()
    theatre.tell(Action.STOP)
    theatre.say(worker, Saved(progress=1.0, path="the best", best=True))
    (saved,) = [event for event in theatre.events if isinstance(event, CheckpointSaved)]
    assert (saved.path, saved.best) == ("the best", True)


def test_the_best_checkpoint_is_told_again_by_whoever_goes_on_from_it(tmp_path: Path) -> None:
    told: list[Saved] = []
    notes: list[str] = []
    keeping = SavingSettings(folder=tmp_path, every_s=60.0, checkpoints=2)
    for _ in range(2):
        keeper = Persistence(keeping, note=notes.append, on_saved=told.append)
        if keeper.load() is None:
            keeper.save(lambda: {"weights": torch.zeros(3)}, 1.0, best=True, wait=True)
            keeper.save(lambda: {"weights": torch.ones(3)}, 2.5, wait=True)
            told.clear()  # as if it had been killed before it could tell
        keeper.finish()
    assert [(one.best, one.progress, Path(one.path).is_file()) for one in told] == [(True, 1.0, True)]
    assert notes == []
