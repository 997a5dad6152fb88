"""Figure 3: how long one decision takes, and how it grows.

Random mixes of the built-in applications on nodes of 4 GPUs, most jobs running, cold tables, one core.
"""

from __future__ import annotations

import math
import time

import numpy as np
from common import verdict

from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.seeds import child_rng
from stretto.models.belief import StatedBelief
from stretto.models.resize import ResizeCost
from stretto.policies.base import ClusterView, JobView
from stretto.policies.pollux import Pollux
from stretto.system.threads import one_blas_thread
from stretto.worlds.applications import ModelTruth, builtin_catalogue

SIZES = [(32, 64), (160, 256), (640, 1024), (2500, 4096), (10_000, 16_384)]
LIMIT_MS = {(32, 64): 20.0, (640, 1024): 150.0, (10_000, 16_384): 2000.0}
NODE_GPUS = 4
REPEATS = 5


def random_view(rng: np.random.Generator, jobs: int, gpus: int) -> ClusterView:
    """Jobs at random points of training; most of them hold GPUs, as long as there are any."""
    nodes = gpu_nodes(gpus // NODE_GPUS, NODE_GPUS)
    free = {node.id: NODE_GPUS for node in nodes}
    catalogue = [app for app in builtin_catalogue().entries.values() if app.max_workers > 1]
    views = []
    for index in range(jobs):
        app = catalogue[int(rng.integers(len(catalogue)))]
        truth = app.truth
        assert isinstance(truth, ModelTruth)
        epoch = int(rng.integers(truth.epochs))
        noise = truth.noise_at(app.initial_batch, epoch)
        age_s = float(rng.uniform(60, 20_000))
        views.append(
            JobView(
                job=app.job(f"{app.name}-{index}", -age_s, app.tuned[0]),
                allocation=_hold(rng, free) if rng.random() < 0.9 else NOTHING,
                batch=None,
                age_s=age_s,
                attained_gpu_s=age_s,
                restarts=int(rng.integers(0, 4)),
                work_done=0.0,
                epoch=epoch,
                belief=StatedBelief(
                    speed=truth.speed,
                    noise=noise,
                    resize=ResizeCost(30.0, 30.0, 0),
                    max_workers_seen=64,
                ),
            )
        )
    return ClusterView(now_s=0.0, nodes=nodes, jobs=tuple(views))


def _hold(rng: np.random.Generator, free: dict[str, int]) -> Allocation:
    node = next((node for node, count in free.items() if count), None)
    if node is None:
        return NOTHING
    count = min(free[node], int(rng.integers(1, NODE_GPUS + 1)))
    free[node] -= count
    if not free[node]:
        del free[node]
    return on_nodes({node: count})


def decision_ms(view: ClusterView) -> float:
    """The least time of several decisions, each from scratch: other work on the machine only adds time."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        Pollux().decide(view, None, child_rng(0, "policy"))
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def main() -> None:
    print("Figure 3: one decision of pollux, least of 5, one core")
    took = []
    with one_blas_thread():
        Pollux().decide(random_view(child_rng(0, "warm-up"), 4, 16), None, child_rng(0, "policy"))
        for jobs, gpus in SIZES:
            milliseconds = decision_ms(random_view(child_rng(0, "bench", str(jobs)), jobs, gpus))
            took.append(milliseconds)
            limit = LIMIT_MS.get((jobs, gpus))
            judged = f"limit {limit:.0f} ms: {verdict(milliseconds < limit)}" if limit else ""
            bar = "#" * max(1, round(12 * math.log10(max(milliseconds, 1.0))))
            print(f"  {jobs:6d} jobs x {gpus:6d} GPUs {milliseconds:9.1f} ms  {bar:42s} {judged}")
    slope = np.polyfit(np.log([jobs for jobs, _ in SIZES]), np.log(took), 1)[0]
    print(f"  log-log slope {slope:.2f} (1 is linear; bars are log-scaled)")


if __name__ == "__main__":
    main()
