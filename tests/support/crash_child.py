"""A run in a process of its own, to be killed: `crash_child.py simulate|processes FOLDER POLICY`.

It goes on from the journal in the folder and prints a line after every turn of its loop.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from builders import make_job
from process_bench import CommandWorkers
from stretto.control.controller import Controller, Settings
from stretto.core.cluster import gpu_nodes
from stretto.core.job import Job, Tier, Work
from stretto.core.observations import NoiseSample
from stretto.core.source import Arrivals
from stretto.journal.sqlite import SqliteJournal
from stretto.policies.registry import make_policy
from stretto.simulation.jobs import Setup, simulate
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.local.slots import Slots
from stretto.worlds.truth import Workload
from toy_world import ToyTruth, toy_job, toy_workload

TURN_S = 0.01
EPOCHS = 12

TRAINER = """
import json, os, signal, sys, time
if os.environ["RANK"] != "0":
    raise SystemExit
from pathlib import Path
folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
name = os.environ["STRETTO_JOB"]
checkpoint, done = folder / f"{name}.epoch", folder / f"{name}.done"
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
epoch = int(checkpoint.read_text()) if checkpoint.exists() else 0
def report():
    print(json.dumps({"work_done": 10.0 * epoch, "epoch": epoch}), flush=True)
report()
while epoch < epochs and not asked:
    time.sleep(0.03)
    epoch += 1
    with done.open("a") as file:
        file.write(f"{epoch}\\n")
    new = checkpoint.with_suffix(".new")
    new.write_text(str(epoch))
    new.rename(checkpoint)
    report()
sys.exit(0 if epoch == epochs else 1)
"""
"""Trains, notes every epoch it does, and saves a checkpoint after each, also when it is asked to stop."""


def sim_workload() -> Workload:
    jobs = [
        replace(toy_job(f"j{i}", 1 + i % 3, submit_s=31.7 * i, most=4), tier=Tier.ADAPTIVE) for i in range(7)
    ]
    return toy_workload(*jobs, truth=ToyTruth(epochs=20, step_s=0.9, split=True, noise=NoiseSample(1.0, 5.0)))


def sim_setup() -> Setup:
    return Setup(nodes=gpu_nodes(2, 4), noise=0.1, seed=5)


def sim_options(policy: str) -> dict[str, str]:
    return {"threshold_gpu_h": "0.03"} if policy == "tiresias" else {}


def process_jobs() -> list[Job]:
    work = Work(units_per_epoch=10.0, epochs=EPOCHS)
    return [replace(make_job(f"p{i}", 1 + i % 2, work=work), submit_s=0.1 * i) for i in range(4)]


def run_simulation(folder: Path, policy: str) -> None:
    journal = SqliteJournal(folder / "journal", run="crash")

    def tick(_: object) -> None:
        print("turn", flush=True)  # noqa: T201
        time.sleep(TURN_S)

    simulate(
        sim_workload(),
        policy,
        sim_setup(),
        options=sim_options(policy),
        journal=journal,
        on_tick=tick,
    )
    journal.close()


def run_processes(folder: Path, policy: str) -> None:
    trainer = folder / "trainer.py"
    trainer.write_text(TRAINER)
    jobs = process_jobs()
    command = Command((sys.executable, "-I", "-S", str(trainer), str(folder), str(EPOCHS)))
    nodes = gpu_nodes(1, 3)
    journal = SqliteJournal(folder / "journal", run="crash")
    commands = {job.id: command for job in jobs}
    slots, rules = Slots(("",) * 3), Rules(command_s=2.0)
    substrate = CommandWorkers(commands, folder, slots=slots, rules=rules)
    try:
        Controller(
            policy=make_policy(policy, interval_s=0.1),
            substrate=substrate,
            journal=journal,
            nodes=nodes,
            arrivals=Arrivals(jobs),
            settings=Settings(),
            on_turn=lambda _: print("turn", flush=True),  # noqa: T201
        ).run()
    finally:
        substrate.close()
        journal.close()


if __name__ == "__main__":
    what, where, name = sys.argv[1:]
    {"simulate": run_simulation, "processes": run_processes}[what](Path(where), name)
