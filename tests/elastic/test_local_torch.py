"""The local substrate with the real training library and a tiny model."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from live_processes import pids_with, running_with
from local_bench import QUICK, job_of
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.events import Event, JobFailed, JobFinished, JobReported, JobRetried
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Value
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots
from stretto.testing.substrates import Sketch, SubstrateCase, SubstrateConformance

pytest.importorskip("torch")

EPOCHS = 8
TRAIN = """
import os
import time
import argparse
import torch

SQUARE = torch.randn(400, 400) @ torch.randn(400, 400)
print("imported with", torch.get_num_threads())

def train(config, run):
    given = argparse.ArgumentParser().parse_args()
    print("process", os.getpid())
    print("threads", torch.get_num_threads(), (SQUARE @ SQUARE).shape[0])
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    for epoch in run.epochs(config["epochs"]):
        loss = torch.zeros(())  # a worker that comes at the end of an epoch finds no batch left
        for inputs, targets in run.loader(data, batch_size=8):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            time.sleep(config["step_s"])
        if epoch == config["raises_at"]:
            raise RuntimeError("no more of this")
        run.report(accuracy=-float(loss.detach()), loss=float(loss.detach()))
"""


def substrate_of(folder: Path, configs: Mapping[str, Mapping[str, Value]]) -> LocalSubstrate:
    script = folder / "train.py"
    script.write_text(TRAIN)
    began_s = time.monotonic()
    return LocalSubstrate(
        spec_of=lambda job: TrainingJob(
            entry=f"{script}:train",
            config={"epochs": EPOCHS, "step_s": 0.01, "raises_at": -1, **configs[job.id]},
            epochs=EPOCHS,
            metric="accuracy",
        ),
        run_dir=folder,
        slots=Slots(("",) * 3),
        clock=lambda: time.monotonic() - began_s,
        rules=QUICK,
    )


class Drive:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.substrate = substrate_of(folder, {"a": {"step_s": 0.05}, "b": {"step_s": 0.0, "raises_at": 2}})
        self.events: list[Event] = []
        self._number = 0

    def tell(self, action: Action, job_id: str = "a", workers: int = 0) -> None:
        self._number += 1
        allocation = on_nodes({"local": workers})
        self.substrate.apply([Instruction(self._number, action, job_id, allocation, BatchChoice(8))])

    def wait_for_epoch(self, epoch: int) -> None:
        until_s = self.substrate.now_s() + 180.0
        while (event := self.substrate.next_event(until_s)) is not None:
            self.events.append(event)
            if isinstance(event, JobReported) and event.job_id == "a" and event.epoch >= epoch:
                return
        raise AssertionError(self.events)

    def rest(self) -> None:
        while (event := self.substrate.next_event(float("inf"))) is not None:
            self.events.append(event)

    def workers(self) -> list[int]:
        """By age, the nursery left out."""
        return pids_with(str(self.folder))[1:]

    def log(self, job_id: str = "a") -> str:
        return (self.folder / "jobs" / job_id / "stdout.log").read_text()


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    made = Drive(tmp_path)
    yield made
    made.substrate.close()
    assert running_with(str(tmp_path)) == []


class RealWorkers(SubstrateConformance):
    def open(self, sketches: tuple[Sketch, ...], folder: Path) -> SubstrateCase:
        configs = {sketch.id: {"raises_at": 2} if sketch.fails else {} for sketch in sketches}
        return SubstrateCase(
            substrate=substrate_of(folder, configs),
            jobs={sketch.id: job_of(sketch.id, EPOCHS) for sketch in sketches},
            small=on_nodes({"local": 1}),
            large=on_nodes({"local": 2}),
            batch=BatchChoice(8),
            other_batch=BatchChoice(4),
            tick_s=0.3,
            patience_s=180.0,
        )


@pytest.mark.parametrize(
    "requirement",
    [
        SubstrateConformance.test_a_resize_keeps_the_work_done,
        SubstrateConformance.test_a_new_substrate_goes_on_from_the_history,
    ],
    ids=lambda requirement: requirement.__name__,
)
def test_what_depends_on_workers_holds_with_real_ones(
    requirement: Callable[[SubstrateConformance, Path], None], tmp_path: Path
) -> None:
    """The rest is tested below or with stubs, as importing torch takes seconds."""
    requirement(RealWorkers(), tmp_path)
    assert running_with(str(tmp_path)) == []


def test_real_training_grows_shrinks_rests_loses_a_worker_and_finishes(
    drive: Drive,
) -> None:
    for job_id in ("a", "b"):
        drive.substrate.admit(job_of(job_id, EPOCHS))
        drive.tell(Action.START, job_id, 1)
    drive.wait_for_epoch(1)
    drive.tell(Action.RESIZE, "a", 2)
    drive.wait_for_epoch(3)
    drive.tell(Action.RESIZE, "a", 1)
    drive.wait_for_epoch(4)
    drive.tell(Action.PARK, "a")
    drive.rest()
    drive.tell(Action.START, "a", 2)
    drive.wait_for_epoch(5)
    os.kill(drive.workers()[-1], signal.SIGKILL)
    drive.rest()
    results = [r for e in drive.events if isinstance(e, JobReported) and e.job_id == "a" for r in e.results]
    assert [result.epoch for result in results] == list(range(1, EPOCHS + 1))
    errors = [event.error for event in drive.events if isinstance(event, JobRetried) and event.job_id == "a"]
    assert len(errors) == 1, errors
    assert "out of memory" in errors[0]
    (failed,) = [event for event in drive.events if isinstance(event, JobFailed)]
    assert "no more of this" in failed.error
    assert [event.subject for event in drive.events if isinstance(event, JobFinished)] == ["a"]
    assert "imported with 1" in (drive.folder / "nursery.log").read_text()
    assert "imported" not in drive.log(), "workers are forked from where the code was imported"
    assert "threads 2 400" in drive.log(), "and have their threads after the fork"


def test_a_process_that_ended_well_serves_the_next_job(drive: Drive) -> None:
    for job_id in ("a", "b"):
        drive.substrate.admit(job_of(job_id, EPOCHS))
    drive.tell(Action.START, "a", 3)
    drive.rest()
    drive.tell(Action.START, "b", 1)
    drive.rest()
    processes = {job_id: set(re.findall(r"process (\d+)", drive.log(job_id))) for job_id in ("a", "b")}
    assert len(processes["a"]) == 3
    assert processes["b"] & processes["a"], "b could have been started in no time"
    assert len(processes["b"]) == 3, "b fails every time, and a process that failed is not used again"
    assert [event.subject for event in drive.events if isinstance(event, JobFinished)] == ["a"]
