"""Jobs that train for real on a Ray cluster under a real controller: so many at once, as long as wanted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fault_train import BATCH, EXAMPLES, STEPS
from stretto.core.events import Event, JobFailed, JobFinished, JobSubmitted
from stretto.core.job import BatchLimits, Job, Role, Work
from stretto.core.resources import Resources
from stretto.driving.drive import NoObserver, RealRun, drive
from stretto.driving.stop import Stop
from stretto.policies.registry import make_policy
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RunFolder
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.substrate import JobFiles
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.substrate import RaySubstrate

RULES = Rules(grace_s=5.0, park_s=10.0, retries=20, heartbeat_s=20.0, hang_s=120.0)
"""No number of faults in a row is too many; that bound has tests."""
MOST_SLOTS = 64
SIZES = (1, 2)
"""Workers of one job and of the next."""


def seed_of(job_id: str) -> int:
    return int(job_id.rpartition("-")[2])


def lr_of(job_id: str) -> float:
    """Another one for every job, so that no job's losses are those of another."""
    return 0.01 + 0.001 * seed_of(job_id)


class Relay:
    """So many jobs at once: when one is over, the next one comes, until there were enough."""

    def __init__(self, at_once: int, epochs: int) -> None:
        self._at_once = at_once
        self._epochs = epochs
        self._running = 0
        self._handed_out = 0
        self._enough = threading.Event()

    def enough(self) -> None:
        """No more come; may be called from any thread."""
        self._enough.set()

    @property
    def to_come(self) -> int:
        return int(not self._enough.is_set())

    def next_s(self) -> float:
        return 0.0 if self.to_come and self._running < self._at_once else math.inf

    def due(self, now_s: float) -> Sequence[Job]:
        missing = self._at_once - self._running if self.to_come else 0
        first, self._handed_out = self._handed_out, self._handed_out + missing
        return [self._job(number, now_s) for number in range(first, first + missing)]

    def observe(self, event: Event) -> None:
        if isinstance(event, JobSubmitted):
            self._running += 1
        elif isinstance(event, JobFinished | JobFailed):
            self._running -= 1

    def _job(self, number: int, now_s: float) -> Job:
        size = SIZES[number % len(SIZES)]
        return Job(
            id=f"job-{number}",
            application="numbers",
            submit_s=now_s,
            worker=Role(demand=Resources(gpu=1), requested=size, min=size, max=size),
            batch=BatchLimits(initial=BATCH, requested=BATCH, max=BATCH, per_gpu_min=1, per_gpu_max=EXAMPLES),
            work=Work(units_per_epoch=STEPS, epochs=self._epochs),
        )


class RayRun:
    """A run in a thread of its own: nodes can be added to a cluster in the main thread only."""

    def __init__(
        self, folder: Path, *, at_once: int, epochs: int, nap_s: float, checkpoint_every_s: float
    ) -> None:
        """`nap_s` makes a step slow; `folder` is the run's."""
        folder.mkdir(parents=True)
        (folder / "train.py").write_text("from fault_train import train\n", encoding="utf-8")
        self.folder = RunFolder(folder)
        self.epochs = epochs
        self.checkpoint_every_s = checkpoint_every_s
        self.source = Relay(at_once, epochs)
        self.began_s = time.monotonic()
        """What times in the journal count from."""
        self.ended_by: EndedBy | None = None
        self.error: BaseException | None = None
        self._nap_s = nap_s
        self._fleet = RayFleet(look_s=0.1)
        self._thread = threading.Thread(target=self._drive, name="the run")
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, within_s: float) -> None:
        self._thread.join(within_s)

    def _drive(self) -> None:
        real_run = RealRun(
            folder=self.folder,
            policy=make_policy("fifo", options={"backfill": "true"}),
            make=self._substrate,
            nodes=self._fleet.nodes(),
            source=self.source,
        )
        try:
            self.ended_by = drive(real_run, Stop(), NoObserver())
        except BaseException as error:  # noqa: BLE001 - it is judged
            self.error = error

    def _substrate(self) -> RaySubstrate:
        return RaySubstrate(
            fleet=self._fleet,
            slots=MOST_SLOTS,
            spec_of=self._spec,
            run_dir=self.folder.path,
            clock=lambda: time.monotonic() - self.began_s,
            rules=RULES,
            files=JobFiles(checkpoint_every_s=self.checkpoint_every_s),
        )

    def _spec(self, job: Job) -> TrainingJob:
        return TrainingJob(
            entry=f"{self.folder.path}/train.py:train",
            config={"lr": lr_of(job.id), "nap_s": self._nap_s},
            epochs=job.work.epochs,
            seed=seed_of(job.id),
        )
