"""Figure: one controller for 1,000 nodes and 5,000 jobs: a decision every 10 s on one core, under 1 GB.

The nodes have four GPUs, and the jobs run under Pollux with one to four workers. The substrate is the one of
a Ray cluster; only the workers are stubs. Another process (scale_swarm.py) opens thousands of connections.
Each sends a heartbeat every second, and speeds and gradient noise every half minute. The controller, with its
journal, models, policy and sockets, has one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from common import verdict

from stretto.control.controller import Controller, Settings
from stretto.core.allocation import Allocation
from stretto.core.cluster import Wish, gpu_nodes
from stretto.core.events import Decided, Event
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.core.source import Arrivals
from stretto.journal.sqlite import SqliteJournal
from stretto.policies.registry import make_policy
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.substrate.elastic.substrate import ElasticSubstrate, JobFiles
from stretto.substrate.elastic.workers import Place
from stretto.system.identity import RunLock
from stretto.system.threads import one_blas_thread

NODES, GPUS, JOBS = 1000, 4, 5000
INTERVAL_S = 10.0
LATE_S = 1.0
SECONDS = 120.0
SWARM = Path(__file__).with_name("scale_swarm.py")


class SwarmNursery:
    """Starts workers in the other process."""

    def __init__(self, swarm: Swarm, on_saying: Callable[[WorkerNews], None]) -> None:
        self._swarm = swarm
        swarm.on_saying = on_saying

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None:
        del log, env
        self._swarm.tell(do="spawn", worker=worker, address=address, secret=secret)

    def end(self, worker: str) -> None:
        self._swarm.tell(do="end", worker=worker)

    kill = end

    def close(self) -> None:
        self._swarm.close()

    def wait(self, patience_s: float) -> None:
        del patience_s


class Swarm:
    """The other process."""

    def __init__(self, cores: set[int]) -> None:
        self.on_saying: Callable[[WorkerNews], None] = lambda _: None
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, str(SWARM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        os.sched_setaffinity(self._process.pid, cores)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **fields: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = json.loads(line)
            self.on_saying(WorkerNews(fields.pop("say"), **fields))


class FakeNodes:
    """Fixed nodes, with GPUs that are only counted."""

    host = "127.0.0.1"
    changes = False

    def __init__(self, swarm: Swarm, nodes: int) -> None:
        self.slots = nodes * GPUS
        self._swarm = swarm
        self._free = Counter({str(number): GPUS for number in range(nodes)})
        self._node_of: dict[str, str] = {}
        self._waiting: dict[str, deque[str]] = {}
        self._granted: list[tuple[str, Place]] = []

    @property
    def provisioner(self) -> FakeNodes:
        return self

    def places_of(self, allocation: Allocation) -> Counter[str]:
        return Counter(dict(allocation.workers))

    def expect(self, entry: str) -> None:
        del entry

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        del job_id
        self._waiting.setdefault(node, deque()).append(worker_id)
        self._serve(node)

    def withdraw(self, worker_id: str) -> bool:
        for queue in self._waiting.values():
            if worker_id in queue:
                queue.remove(worker_id)
                return True
        return False

    def grants(self) -> list[tuple[str, Place]]:
        granted, self._granted = self._granted, []
        return granted

    def give_back(self, worker_id: str) -> None:
        node = self._node_of.pop(worker_id, None)
        if node is not None:
            self._free[node] += 1
            self._serve(node)

    def abandoned(self) -> list[str]:
        return []

    def fork_server(
        self, home: str, entry: str, on_saying: Callable[[WorkerNews], None], on_end: Callable[[], None]
    ) -> SwarmNursery:
        del home, entry, on_end
        return SwarmNursery(self._swarm, on_saying)

    def provision(self, wish: Wish, t_s: float) -> list[Event]:
        del wish, t_s
        return []

    def look(self, t_s: float) -> list[Event]:
        del t_s
        return []

    def recall(self, history: Iterable[Event], t_s: float) -> list[Event]:
        del history, t_s
        return []

    def close(self) -> None:
        self._swarm.close()

    def _serve(self, node: str) -> None:
        queue = self._waiting.get(node, deque())
        while queue and self._free[node]:
            worker_id = queue.popleft()
            self._free[node] -= 1
            self._node_of[worker_id] = node
            self._granted.append((worker_id, Place(name=worker_id, home="", env={}, stays=False)))


def job(number: int) -> Job:
    return Job(
        id=f"job-{number}",
        application=f"app-{number % 20}",
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1), max=4),
        tier=Tier.ADAPTIVE,
        batch=BatchLimits(initial=16, requested=16, max=256, per_gpu_min=4, per_gpu_max=64),
        work=Work(units_per_epoch=1e6, epochs=100),
    )


class Watched:
    """The journal, and when decisions were recorded."""

    def __init__(self, inner: SqliteJournal) -> None:
        self._inner = inner
        self.decided_s: list[float] = []
        self.events_seen = 0

    def append(self, events: Iterable[Event]) -> None:
        told = list(events)
        self._inner.append(told)
        self.events_seen += len(told)
        self.decided_s += [event.t_s for event in told if isinstance(event, Decided)]

    def events(self) -> Iterator[Event]:
        return self._inner.events()

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--policy", default="pollux")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    cores = sorted(os.sched_getaffinity(0))
    swarm = Swarm({cores[-1]})
    os.sched_setaffinity(0, {cores[0]})
    with tempfile.TemporaryDirectory() as name, one_blas_thread():
        folder = Path(name)
        began_s = time.monotonic()
        substrate = ElasticSubstrate(
            FakeNodes(swarm, asked.nodes),
            spec_of=lambda _: TrainingJob(entry="train.py:train", config={}, epochs=None, follows_batch=True),
            run_dir=folder,
            lock=RunLock(folder / "lock", patience_s=1.0),
            clock=lambda: time.monotonic() - began_s,
            rules=Rules(),
            files=JobFiles(),
        )
        journal = Watched(SqliteJournal(folder / "journal.sqlite", run="scale"))
        controller = Controller(
            policy=make_policy(asked.policy, interval_s=INTERVAL_S),
            substrate=substrate,
            journal=journal,
            nodes=gpu_nodes(asked.nodes, GPUS),
            arrivals=Arrivals([job(number) for number in range(asked.jobs)]),
            settings=Settings(until_s=asked.seconds, share_priors=True),
        )
        cpu_s = time.process_time()
        controller.run()
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        substrate.stop_now()
    report(journal, controller, wall_s, cpu_s)


def report(journal: Watched, controller: Controller, wall_s: float, cpu_s: float) -> None:
    running = sum(state.gpus for state in controller.state.jobs.values())
    gaps = [later - one for one, later in zip(journal.decided_s, journal.decided_s[1:], strict=False)]
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    jobs = len(controller.state.jobs)
    print(f"{jobs} jobs, {running} workers, {journal.events_seen} events in {wall_s:.0f} s")
    print(f"decisions at {', '.join(f'{t_s:.1f}' for t_s in journal.decided_s[:20])} s")
    longest_s = max(gaps, default=float("inf"))
    print(f"longest time between two decisions {longest_s:.1f} s, {INTERVAL_S:g} s wanted: ", end="")
    print(verdict(longest_s <= INTERVAL_S + LATE_S))
    print(f"processor time {cpu_s / wall_s:.2f} of one core, below 1 wanted: {verdict(cpu_s < wall_s)}")
    print(f"memory {memory_gb:.2f} GB, below 1 wanted: {verdict(memory_gb < 1.0)}")


if __name__ == "__main__":
    main()
