"""Figure: 1,000 random decisions on a Ray cluster of 32 nodes; every worker must run on its node.

The nodes are real raylets on this machine, each with two GPUs that do not exist. Workers are real processes
that sleep instead of training. In every round each of eight jobs gets a random allocation, as far as there is
room: some grow, shrink, move in part or as a whole, or are parked. Then we check which raylet each process
belongs to, and which GPUs it was given. During the change no node may have more workers than GPUs, and no two
workers of a node may share a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import TEST_HELPERS, verdict

sys.path += TEST_HELPERS
from ray_bench import RayBench, SmallCluster, small_cluster
from ray_seen import SeenWorker, seen_workers
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.instructions import Action

NODES, GPUS = 32, 2
JOBS = 8
MOST_WORKERS = 5
DECISIONS = 1000
PATIENCE_S = 60.0
EPOCHS = 1_000_000
KEPT_S = 3600.0
"""Leases stay: starting one takes a second of processor time, and all nodes share this machine."""


@dataclass(slots=True)
class Findings:
    """What was wrong, and how often everything was right."""

    decisions: int = 0
    right: int = 0
    crowded: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def random_allocations(chance: random.Random, nodes: list[str]) -> dict[str, Allocation]:
    """A random allocation for every job; together they fit."""
    free = [node for node in nodes for _ in range(GPUS)]
    chance.shuffle(free)
    given = {}
    for number in range(JOBS):
        count = chance.choice([0, *range(1, MOST_WORKERS + 1)])
        mine, free = free[:count], free[count:]
        given[f"job-{number}"] = on_nodes(Counter(mine))
    return given


def crowded(workers: list[SeenWorker], cluster: SmallCluster) -> Iterator[str]:
    by_gpu = Counter((cluster.node_of(worker.raylet), worker.gpus) for worker in workers)
    yield from (
        f"{count} workers have GPU {gpu} of {node}" for (node, gpu), count in by_gpu.items() if count > 1
    )
    by_node = Counter(cluster.node_of(worker.raylet) for worker in workers)
    yield from (f"{count} workers on {node}" for node, count in by_node.items() if count > GPUS)


def where_they_are(workers: list[SeenWorker], cluster: SmallCluster) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for worker in workers:
        found.setdefault(worker.job_id, Counter())[cluster.node_of(worker.raylet)] += 1
    return found


def play_round(
    bench: RayBench, cluster: SmallCluster, given: dict[str, Allocation], findings: Findings
) -> None:
    for job_id, allocation in given.items():
        bench.tell(Action.RESIZE if allocation else Action.PARK, job_id, allocation)
    wanted = {job_id: Counter(dict(one.workers)) for job_id, one in given.items() if one}
    end_s = time.monotonic() + PATIENCE_S
    while True:
        bench.substrate.next_event(bench.substrate.now_s() + 0.05)
        workers = seen_workers(bench.folder)
        findings.crowded.update(crowded(workers, cluster))
        found = where_they_are(workers, cluster)
        if found == wanted or time.monotonic() > end_s:
            break
    findings.decisions += len(given)
    misplaced = [job_id for job_id in given if found.get(job_id) != wanted.get(job_id)]
    findings.right += len(given) - len(misplaced)
    findings.wrong += [
        f"{job_id} is on {dict(found.get(job_id, {}))} instead of {dict(wanted.get(job_id, {}))}"
        for job_id in misplaced
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=DECISIONS)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder, small_cluster((GPUS,) * asked.nodes) as cluster:
        bench = RayBench(
            Path(folder),
            slots=asked.nodes * GPUS,
            config=lambda _: {"step_s": 0.05},
            epochs=EPOCHS,
            idle_s=KEPT_S,
        )
        chance = random.Random(asked.seed)
        for number in range(JOBS):
            bench.admit(f"job-{number}")
        began_s = time.monotonic()
        while findings.decisions < asked.decisions:
            play_round(bench, cluster, random_allocations(chance, sorted(cluster.raylets)), findings)
        took_s = time.monotonic() - began_s
        bench.substrate.stop_now()
    for problem in [*sorted(findings.crowded), *findings.wrong][:20]:
        print(f"  {problem}")
    right = findings.right == findings.decisions
    print(f"{findings.decisions} decisions in {took_s:.0f} s on {asked.nodes} nodes")
    print(f"workers where they were decided   {findings.right} of {findings.decisions}   {verdict(right)}")
    print(f"GPUs with two workers             {len(findings.crowded)}   {verdict(not findings.crowded)}")


if __name__ == "__main__":
    main()
