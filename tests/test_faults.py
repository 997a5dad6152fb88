"""Some of every kind of fault over a running study; `benchmarks/faults.py` has two hundred."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fault_inject import Disturbed, Kind, Supply
from fault_judge import problems
from fault_study import lay_out

TRIALS = 5
EPOCHS = 16
FAULTS = [*Kind, Kind.WORKER, Kind.CHECKPOINT, Kind.RAISE]


def test_a_study_comes_to_its_end_whatever_happens(tmp_path: Path) -> None:
    lay_out(tmp_path, trials=TRIALS, epochs=EPOCHS, nap_s=0.04, epoch_s=0.4)
    kinds = random.Random(0).sample(FAULTS, len(FAULTS))
    study = Disturbed(tmp_path, "hypersched", 0)
    study.live(Supply(kinds), within_s=300.0)
    assert sorted(fault.kind for fault in study.faults) == sorted(kinds)
    assert [*study.problems, *problems(study, trials=TRIALS, epochs=EPOCHS)] == []
