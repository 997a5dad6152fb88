"""A job on the local substrate of a machine with one card: it starts, grows to two workers that share the
card, shrinks, is parked and resumes (about 1 minute on an H200).

    PYTHONPATH=src python3 benchmarks/gpu/elastic.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shared import as_it_is, device_name, random_images, resnet18, save
from torch.nn.functional import cross_entropy

from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.events import Event, JobFailed, JobNoted, JobReported, JobRetried
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Work
from stretto.core.resources import Resources
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import find_slots
from stretto.torch import Run

BATCH = 256


def train(config: dict[str, Any], run: Run) -> None:
    torch.manual_seed(0)
    model = resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    data = random_images(64 * BATCH)
    for _ in run.epochs(config["epochs"]):
        for images, labels in run.loader(data, batch_size=BATCH, collate_fn=as_it_is):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            torch.autograd.backward(loss)
            optimizer.step()
        run.report(loss=float(loss.detach()))


class Drive:
    """Tells one job what to do, and waits for what it reports."""

    def __init__(self, folder: Path) -> None:
        began_s = time.monotonic()
        self.substrate = LocalSubstrate(
            spec_of=lambda _: TrainingJob(
                entry=f"{Path(__file__)}:train", config={"epochs": 1000}, epochs=None
            ),
            run_dir=folder,
            slots=find_slots(2),
            clock=lambda: time.monotonic() - began_s,
        )
        self.substrate.admit(
            Job(
                id="a",
                application="a",
                submit_s=0.0,
                worker=Role(demand=Resources(gpu=1), max=2),
                batch=BatchLimits(
                    initial=BATCH, requested=BATCH, max=BATCH, per_gpu_min=1, per_gpu_max=BATCH
                ),
                work=Work(units_per_epoch=1.0, epochs=1000),
            )
        )
        self._number = 0

    def tell(self, action: Action, workers: int) -> None:
        self._number += 1
        allocation: Allocation = on_nodes({"local": workers}) if workers else NOTHING
        self.substrate.apply([Instruction(self._number, action, "a", allocation, BatchChoice(BATCH))])

    def next_resize(self) -> JobReported:
        """The report of the next start or resize, and of some steps after it."""
        resized: JobReported | None = None
        end_s = self.substrate.now_s() + 120
        while (event := self.substrate.next_event(end_s)) is not None:
            _show_trouble(event)
            if isinstance(event, JobReported):
                resized = event if event.resize_s is not None else resized
                if resized is not None and event.speeds and event is not resized:
                    step_ms = 1e3 * event.speeds[-1].step_s
                    print(f"  took {resized.resize_s:6.2f} s; then {step_ms:.1f} ms a step")
                    return resized
        raise RuntimeError("nothing was heard of the job for two minutes")


def _show_trouble(event: Event) -> None:
    if isinstance(event, JobFailed | JobRetried):
        print(f"  {event.error}")
    elif isinstance(event, JobNoted):
        print(f"  {event.text}")


def main() -> None:
    print(f"The local substrate, {device_name()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        drive = Drive(Path(folder))
        times_s = {}
        for name, action, workers in (
            ("start, code loading included", Action.START, 1),
            ("grow to 2 on one card", Action.RESIZE, 2),
            ("shrink to 1", Action.RESIZE, 1),
            ("park and start", Action.START, 1),
        ):
            if name.startswith("park"):
                drive.tell(Action.PARK, 0)
            print(name, flush=True)
            drive.tell(action, workers)
            times_s[name] = drive.next_resize().resize_s
        drive.substrate.close()
        log = (Path(folder) / "jobs" / "a" / "stdout.log").read_text()
        print(log[-1000:])
    save("elastic", {"device": device_name(), "times_s": times_s})


if __name__ == "__main__":
    main()
