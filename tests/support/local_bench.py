"""A local substrate with stub workers, and what tests ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from live_processes import running_with
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.events import Event
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Value, Work
from stretto.core.resources import Resources
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import Trainer
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots

STUB = Trainer("local_stub:main", "local_stub:load", ())
EPOCHS = 6
BATCH = BatchChoice(16)
QUICK = Rules(grace_s=2.0, park_s=10.0, heartbeat_s=20.0, hang_s=30.0)


def job_of(job_id: str, epochs: int = EPOCHS) -> Job:
    return Job(
        id=job_id,
        application="tiny",
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1), max=4),
        tier=Tier.ADAPTIVE,
        batch=BatchLimits(initial=16, requested=16, max=64, per_gpu_min=1, per_gpu_max=64),
        work=Work(units_per_epoch=10.0, epochs=epochs),
    )


class Bench:
    """A substrate on two slots, with jobs of stub workers."""

    def __init__(self, folder: Path, *, rules: Rules = QUICK, slots: int = 2) -> None:
        self.folder = folder
        self.entry = str(folder / "train.py:train")
        self.specs: dict[str, TrainingJob] = {}
        began_s = time.monotonic()
        self.substrate = LocalSubstrate(
            spec_of=lambda job: self.specs[job.id],
            run_dir=folder,
            slots=Slots(("",) * slots),
            clock=lambda: time.monotonic() - began_s,
            rules=rules,
            trainer=STUB,
        )
        self.seen: list[Event] = []
        self._number = 0

    def admit(
        self,
        job_id: str = "a",
        *,
        epochs: int = EPOCHS,
        entry: str | None = None,
        waits: bool = False,
        **config: Value,
    ) -> None:
        self.specs[job_id] = TrainingJob(
            entry=entry or self.entry,
            config=config,
            epochs=epochs,
            metric="accuracy",
            waits_for_ack=waits,
            follows_batch=True,
        )
        self.substrate.admit(job_of(job_id, epochs))

    def tell(self, action: Action, workers: int = 0, job_id: str = "a") -> None:
        self._number += 1
        allocation = on_nodes({"local": workers})
        self.substrate.apply([Instruction(self._number, action, job_id, allocation, BATCH)])

    def run(self, workers: int = 1, job_id: str = "a") -> None:
        self.tell(Action.START, workers, job_id)

    def wait_for(self, kind: type[Event], where: Callable[[Event], bool] = lambda _: True) -> Event:
        """The next event of a kind; those before it are seen too."""
        until_s = self.substrate.now_s() + 90.0
        while (event := self.substrate.next_event(until_s)) is not None:
            self.seen.append(event)
            if isinstance(event, kind) and where(event):
                return event
        raise AssertionError(f"no {kind.__name__} among {self.seen}")

    def rest(self) -> list[Event]:
        """Everything until nothing runs any more."""
        while (event := self.substrate.next_event(float("inf"))) is not None:
            self.seen.append(event)
        return self.seen

    def log(self, job_id: str = "a") -> str:
        return (self.folder / "jobs" / job_id / "stdout.log").read_text()

    def left(self) -> list[str]:
        return running_with(str(self.folder))
