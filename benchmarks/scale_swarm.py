"""Thousands of workers in one process, for scale.py: each talks to the controller as a real one would.

The process reads orders to start and end workers on standard input, one JSON object per line. It writes which
workers have started and ended on standard output. Workers of a group obey orders at once, send a heartbeat
every second, and report regularly.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

from stretto.core.observations import NoiseSample, SpeedSample
from stretto.wire.channel import proof_of
from stretto.wire.codec import decode, encode
from stretto.wire.messages import (
    Beat,
    FinishEpoch,
    Form,
    Formed,
    FromWorker,
    Leave,
    Left,
    Message,
    Park,
    Ready,
    Report,
    SetBatch,
    Task,
)

BEAT_S = 1.0
REPORT_S = 30.0
STEP_S = 0.1


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


@dataclass(slots=True)
class Worker:
    """One connection."""

    name: str
    writer: asyncio.StreamWriter
    job_id: str = ""
    form: Form | None = None
    batch: int = 16
    steps: int = 0
    over: bool = False

    def send(self, message: FromWorker) -> None:
        if not self.over:
            self.writer.write(encode(message))

    def leave(self, why: str) -> None:
        self.send(Left(why, saved=True, leaves=True))
        self.over = True
        self.writer.close()


@dataclass(slots=True)
class Swarm:
    """All of them, by name and by job."""

    workers: dict[str, Worker] = field(default_factory=dict)
    jobs: dict[str, set[str]] = field(default_factory=dict)
    progress: dict[str, float] = field(default_factory=dict)

    async def live(self, name: str, address: str, secret: str) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await shake_hands(reader, writer, name, secret)
        worker = self.workers[name] = Worker(name, writer)
        say(say="born", worker=name, pid=1)
        try:
            while line := await reader.readline():
                self.take(worker, decode(line))
                if worker.over:
                    break
        except ConnectionError:
            pass
        writer.close()
        worker.over = True
        self.workers.pop(name, None)
        self.jobs.get(worker.job_id, set()).discard(name)
        say(say="gone", worker=name, code=0)

    def take(self, worker: Worker, message: Message) -> None:
        match message:
            case Task():
                worker.job_id = message.job_id
                self.jobs.setdefault(message.job_id, set()).add(worker.name)
                worker.send(Ready(store="here:1/1"))
            case Form():
                worker.form = message
                worker.batch = message.batch.atomic if message.batch else worker.batch
                if message.rank == 0:
                    worker.send(Formed(message.generation))
            case SetBatch():
                worker.batch = message.batch.atomic
            case Leave():
                worker.leave("not needed")
            case Park() | FinishEpoch():
                for name in list(self.jobs[worker.job_id]):
                    if name in self.workers and self.workers[name].form is not None:
                        self.workers[name].leave("parked")
            case _:
                pass

    async def beat(self) -> None:
        chance = random.Random(0)
        while True:
            began_s = asyncio.get_running_loop().time()
            for worker in list(self.workers.values()):
                if worker.form is not None:
                    worker.steps += round(BEAT_S / STEP_S)
                worker.send(Beat(worker.steps))
                if worker.form is not None and worker.form.rank == 0 and chance.random() < BEAT_S / REPORT_S:
                    worker.send(self.report(worker, worker.form, chance))
            await asyncio.sleep(max(BEAT_S - (asyncio.get_running_loop().time() - began_s), 0.0))

    def report(self, worker: Worker, form: Form, chance: random.Random) -> Report:
        done = self.progress[worker.job_id] = self.progress.get(worker.job_id, 0.0) + 0.01
        step_s = STEP_S * chance.uniform(0.9, 1.1)
        sync_s = step_s / 5 if form.world > 1 else 0.0
        speed = SpeedSample(form.nodes, form.world, 0, worker.batch, step_s, sync_s)
        noise = NoiseSample(chance.uniform(0.5, 1.5), chance.uniform(50.0, 150.0))
        return Report(progress=done, epoch=0, steps=worker.steps, speeds=(speed,), noise=noise)

    def end(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            worker.over = True
            worker.writer.close()


async def shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, secret: str
) -> None:
    nonce = json.loads(await reader.readline())["nonce"]
    own = secrets.token_hex(16)
    fields = {"worker": name, "nonce": own, "proof": proof_of(secret, "worker", name, nonce)}
    writer.write(json.dumps(fields).encode() + b"\n")
    await reader.readline()


async def main() -> None:
    swarm = Swarm()
    orders = asyncio.StreamReader(limit=1 << 22)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    tasks = {loop.create_task(swarm.beat())}
    while line := await orders.readline():
        order = json.loads(line)
        if order["do"] == "spawn":
            task = loop.create_task(swarm.live(order["worker"], order["address"], order["secret"]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            swarm.end(order["worker"])


if __name__ == "__main__":
    asyncio.run(main())
