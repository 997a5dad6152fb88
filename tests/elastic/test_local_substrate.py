"""Real processes with stub workers: the conformance suite, and every fault a run must survive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from live_processes import SUPPORT, running_with
from local_bench import BATCH, EPOCHS, QUICK, STUB, job_of
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.cluster import Wish
from stretto.core.job import Value
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots
from stretto.testing.substrates import Sketch, SubstrateCase, SubstrateConformance


@pytest.fixture(autouse=True)
def _stubs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


class TestConformance(SubstrateConformance):
    until: Mapping[str, Value] = {}
    """The change that jobs wait for half-way."""

    def open(self, sketches: tuple[Sketch, ...], folder: Path) -> SubstrateCase:
        fails = {sketch.id: sketch.fails for sketch in sketches}

        def spec_of(job_id: str) -> TrainingJob:
            trouble: dict[str, Value] = (
                {"trouble": "raise", "at_step": 14} if fails[job_id] else dict(self.until)
            )
            return TrainingJob(
                entry=str(folder / "train.py:train"), config=trouble, epochs=EPOCHS, follows_batch=True
            )

        began_s = time.monotonic()
        return SubstrateCase(
            substrate=LocalSubstrate(
                spec_of=lambda job: spec_of(job.id),
                run_dir=folder,
                slots=Slots(("",) * 4),
                clock=lambda: time.monotonic() - began_s,
                rules=QUICK,
                trainer=STUB,
            ),
            jobs={sketch.id: job_of(sketch.id) for sketch in sketches},
            small=on_nodes({"local": 1}),
            large=on_nodes({"local": 2}),
            batch=BATCH,
            other_batch=BatchChoice(32),
            tick_s=0.25,
            patience_s=90.0,
            wish=Wish((("slot", 2),)),
        )

    def leftovers(self, folder: Path) -> list[str]:
        return running_with(str(folder))

    def test_a_resize_keeps_the_work_done(self, tmp_path: Path) -> None:
        self.until = {"until_workers": 2}
        super().test_a_resize_keeps_the_work_done(tmp_path)

    def test_a_new_batch_size_keeps_the_work_done(self, tmp_path: Path) -> None:
        self.until = {"until_batch": 32}
        super().test_a_new_batch_size_keeps_the_work_done(tmp_path)
