"""Figure 1: the published simulator's results, reproduced; and what our deviations from it change.

Tiresias, Optimus with an oracle, and Pollux on the published workloads under the published clock, against the
per-job completion times its authors stored. Then the same with exact epochs and with the event-driven clock.
"""

from __future__ import annotations

import gzip
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from common import data_folder, verdict

from stretto.simulation.jobs import Setup, simulate
from stretto.worlds.measured import load_profiles
from stretto.worlds.workload_files import read_workload

WORKLOADS = (1, 2, 3, 4)
STORED_AS = {"tiresias": "tiresias-1.0", "optimus-oracle": "optimus-1.0", "pollux": "pollux-1.0"}
CLOCKS = {
    "published clock": Setup(rounds=True),
    "exact epochs": Setup(rounds=True, whole_seconds=False),
    "event-driven": Setup(priors=False),
    "event-driven, priors": Setup(),
}


def run(data: Path, policy: str, workload: int, clock: str) -> dict[str, float]:
    """Completion time of every job."""
    jobs = read_workload(data / "workloads" / f"workload-{workload}.csv", load_profiles([data / "traces"]))
    done = simulate(jobs, policy, CLOCKS[clock])
    return {job_id: job.jct_s for job_id, job in done.history.jobs.items() if job.jct_s is not None}


def stored(data: Path, policy: str, workload: int) -> dict[str, float]:
    path = data / "results-jobload" / STORED_AS[policy] / "summary.json.gz"
    jcts: dict[str, float] = json.loads(gzip.decompress(path.read_bytes()))["jcts"][f"workload-{workload}"]
    return jcts


def main() -> None:
    print("Figure 1: mean completion time against the stored results of the published simulator")
    data = data_folder("pollux")
    if data is None:
        print("  skipped: the published workloads and profiles are missing (STRETTO_DATA)")
        return
    keys = [(policy, workload, clock) for clock in CLOCKS for policy in STORED_AS for workload in WORKLOADS]
    with ProcessPoolExecutor(2) as pool:
        futures = {key: pool.submit(run, data, *key) for key in keys}
        results = {key: future.result() for key, future in futures.items()}
    for clock in CLOCKS:
        for policy in STORED_AS:
            _line(data, policy, clock, results)
    _time_pollux(data)


def _time_pollux(data: Path) -> None:
    """Run alone, since two simulations at once slow each other down."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    run(data, "pollux", WORKLOADS[0], "published clock")
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    print(f"  pollux simulates 160 jobs in {wall_s:.1f} s ({cpu_s:.1f} s CPU): {verdict(wall_s < 15)} (15 s)")


def _line(
    data: Path,
    policy: str,
    clock: str,
    results: dict[tuple[str, int, str], dict[str, float]],
) -> None:
    means, references, same = [], [], 0
    for workload in WORKLOADS:
        jcts, reference = results[policy, workload, clock], stored(data, policy, workload)
        means.append(float(np.mean(list(jcts.values()))))
        references.append(float(np.mean(list(reference.values()))))
        same += sum(jcts.get(job) == jct for job, jct in reference.items())
    ratios = [mean / reference for mean, reference in zip(means, references, strict=True)]
    average = float(np.mean(means) / np.mean(references))
    each = " ".join(f"{ratio:.3f}" for ratio in ratios)
    judged = ""
    if clock == "published clock":
        reached = 0.95 <= average <= 1.05 and all(0.90 <= ratio <= 1.10 for ratio in ratios)
        judged = f", {same} of 640 jobs to the second: {verdict(reached)}"
    print(f"  {clock:21s} {policy:15s} {np.mean(means):7.0f} s, x{average:.3f} of stored ({each}){judged}")


if __name__ == "__main__":
    main()
