"""A study that is tuned without processes: the substrate is a simulation, everything around it is real."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from stretto.core.events import Event
from stretto.core.job import Job
from stretto.driving.drive import RealSubstrate
from stretto.driving.substrate import TrainingSpec
from stretto.planning.profile import Latency, Profile, Scaling
from stretto.pricing.instances import Instance
from stretto.runs.folder import RunFolder
from stretto.search.study import Direction
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.worlds.curves import FAMILIES
from stretto.worlds.trials import StudyWorld

TRUTH = Profile(latency=Latency(epoch_s=10.0), scaling=Scaling(((1, 1.0), (2, 1.8))), start_s=2.0)

STUDY = """
[study]
name = "tiny"
metric = "accuracy"
direction = "max"
trials = 6

[halving]
rungs = "geometric"
min_epochs = 2
eta = 2
max_epochs = 8

[space]
lr = { log = [1e-4, 1.0] }

[machine]
slots = 2

[profile]
epoch_s = 10
speedup = { "1" = 1.0, "2" = 1.8 }
start_s = 2
"""

KNOWN = STUDY.replace("epoch_s = 10", "epoch_s = 0.1").replace("slots = 2", "usd_per_slot_hour = 3.6")
"""The same where training is real: on a cluster's own slots, with a price."""

SCRIPT = """
def train(config, run):
    pass
"""

TRAIN = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(config, run):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x.sum(1, keepdim=True) > 0).float()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(100):
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
            optimizer.step()
            time.sleep(0.2 if os.path.exists("slow") else 0.01)
        run.report(accuracy=((model(x) > 0).float() == y).float().mean().item())
"""
"""A real training, of a moment; with a file `slow` beside it, of many."""


class SimulatedWorkers(SimSubstrate):
    """Simulated workers with the ways to end them that real ones have."""

    def __init__(
        self, training: TrainingSpec, *, until_s: float = float("inf"), break_off: bool = False
    ) -> None:
        slot = Instance(name="slot", gpus=1, usd_per_hour=1.0)
        machine = Instance(name="machine", gpus=training.slots, usd_per_hour=2.0)
        world = StudyWorld(FAMILIES[0], TRUTH, instances=(slot, machine), nodes=training.nodes, seed=0)
        super().__init__(
            world.truth_of,
            physics=Physics(restart_s=TRUTH.start_s),
            seed=0,
            cloud=None if training.nodes else world.cloud,
        )
        self._break_off_s = until_s
        self._break_off = break_off
        self.finishing = 0
        self.killed = 0

    def next_event(self, until_s: float) -> Event | None:
        if self._break_off and self.now_s() >= self._break_off_s:
            raise SystemExit(9)
        return super().next_event(until_s)

    def finish_epochs(self) -> None:
        self.finishing += 1
        self.close()

    def stop_now(self) -> None:
        self.killed += 1
        self.close()


def simulated(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
    """Makes a simulation where a run wants processes."""
    del folder, clock
    assert training.study is None or training.study.direction is Direction.MAX
    return SimulatedWorkers(training)


class Endless(SimulatedWorkers):
    """A probe trains for as long as it likes; simulated curves have to end somewhere."""

    def admit(self, job: Job) -> None:
        work = dataclasses.replace(job.work, epochs=job.work.epochs or 1000)
        super().admit(dataclasses.replace(job, work=work))


def endless(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
    del folder, clock
    return Endless(training)


def write_study(folder: Path, text: str = STUDY) -> Path:
    """A study and its training script in a folder."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    return path
