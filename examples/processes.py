"""Three real commands share four slots of this machine, first come first served.

Each command is a small Python program. It "trains" for a few epochs, prints a JSON line after each, and saves
its own checkpoint. You may kill this script and start it again in the same folder: it resumes from its
journal, and the commands resume from their checkpoints.
"""

import sys
import time
from pathlib import Path

from stretto.control.controller import Controller, Settings
from stretto.core.cluster import gpu_nodes
from stretto.core.events import Decided, JobFinished
from stretto.core.job import BatchLimits, Job, Role, Work
from stretto.core.resources import Resources
from stretto.core.source import Arrivals
from stretto.journal.folds.history import history_of
from stretto.journal.sqlite import SqliteJournal
from stretto.policies.fifo import Fifo
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.elastic.fork_servers import NO_ENTRY
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots

EPOCHS = 3
TRAINER = """
import json, os, sys, time
if os.environ["RANK"] != "0":
    sys.exit()  # a real program would train with the others
checkpoint = sys.argv[1]
epoch = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
while epoch < 3:
    time.sleep(0.1)
    epoch += 1
    open(checkpoint, "w").write(str(epoch))
    print(json.dumps({"epoch": epoch, "work_done": 100 * epoch, "loss": 1 / epoch}), flush=True)
"""
SLOTS = {"tokenizer": 1, "vision": 3, "speech": 2}


def job(name: str, slots: int) -> Job:
    return Job(
        id=name,
        application=name,
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1), requested=slots, min=slots, max=slots),
        batch=BatchLimits(initial=64, requested=64, max=64, per_gpu_min=1, per_gpu_max=64),
        work=Work(units_per_epoch=100.0, epochs=EPOCHS),
    )


def command_of(job: Job, folder: Path) -> TrainingJob:
    command = Command((sys.executable, "-c", TRAINER, str(folder.absolute() / f"{job.id}.epoch")))
    return TrainingJob(entry=NO_ENTRY, config={}, epochs=job.work.epochs, command=command)


def main() -> None:
    folder = Path("runs/processes")
    nodes = gpu_nodes(1, 4)
    jobs = [job(name, slots) for name, slots in SLOTS.items()]
    begun_s = time.time()
    journal = SqliteJournal(folder / "journal.sqlite", run="processes")
    substrate = LocalSubstrate(
        spec_of=lambda one: command_of(one, folder),
        run_dir=folder,
        slots=Slots(("",) * 4),
        clock=lambda: time.time() - begun_s,
        runs_commands=True,
    )
    try:
        Controller(
            policy=Fifo(),
            substrate=substrate,
            journal=journal,
            nodes=nodes,
            arrivals=Arrivals(jobs),
            settings=Settings(),
        ).run()
    finally:
        substrate.close()
    events = list(journal.events())
    for decided in (event for event in events if isinstance(event, Decided)):
        for told in decided.instructions:
            print(f"{told.action} {told.job_id} with {told.allocation.worker_count} slots")
    for name in sorted(event.job_id for event in events if isinstance(event, JobFinished)):
        past = history_of(events).jobs[name]
        losses = " ".join(f"{point.loss:.2f}" for point in past.losses)
        print(f"{name} finished after {len(past.losses)} epochs, {past.restarts} restarts, losses {losses}")
    journal.close()


if __name__ == "__main__":
    main()
