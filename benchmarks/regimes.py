"""Beyond figure 1: other loads, intervals and interference, against stored results."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import data_folder

from stretto.simulation.jobs import Setup, simulate
from stretto.worlds.measured import load_profiles
from stretto.worlds.workload_files import read_workload

WORKLOADS = (1, 2)


@dataclass(frozen=True)
class Regime:
    """One condition, and where its stored results are."""

    name: str
    policy: str
    stored: str
    workloads: str = "workloads"
    setup: Setup = field(default_factory=lambda: Setup(rounds=True))
    options: tuple[tuple[str, str], ...] = ()


def _load(policy: str, stored: str, load: str) -> Regime:
    folder = "workloads" if load == "1.0" else f"workloads-{load}"
    return Regime(f"{policy}, load {load}", policy, f"results-jobload/{stored}-{load}", folder)


def _unguarded(slowdown: float, stored: str) -> Regime:
    return Regime(
        f"pollux, interference of {slowdown:.0%} not avoided",
        "pollux",
        f"results-inter/{stored}",
        setup=Setup(rounds=True, interference=slowdown),
        options=(("interference", "false"),),
    )


def _interval(seconds: float, stored: str) -> Regime:
    return Regime(
        f"pollux every {seconds:.0f} s",
        "pollux",
        f"results-period/pollux-{stored}",
        setup=Setup(rounds=True, interval_s=seconds),
    )


REGIMES = (
    *(_load("tiresias", "tiresias", load) for load in ("0.5", "1.5", "2.0")),
    *(_load("optimus-oracle", "optimus", load) for load in ("0.5", "1.5", "2.0")),
    *(_load("pollux", "pollux", load) for load in ("0.5", "1.5", "2.0")),
    _unguarded(0.0, "noavoid"),
    _unguarded(0.25, "inter25"),
    _unguarded(0.5, "inter50"),
    _interval(30.0, "30s"),
    _interval(120.0, "2m"),
    _interval(240.0, "4m"),
    _interval(480.0, "8m"),
)


def ratio(data: Path, regime: Regime, workload: int) -> tuple[float, float]:
    """Mean completion time, simulated and stored."""
    jobs = read_workload(
        data / regime.workloads / f"workload-{workload}.csv", load_profiles([data / "traces"])
    )
    metrics = simulate(jobs, regime.policy, regime.setup, options=dict(regime.options)).metrics
    summary = json.loads(gzip.decompress((data / regime.stored / "summary.json.gz").read_bytes()))
    return metrics.mean_jct_s or float("nan"), float(summary["avgs"][f"workload-{workload}"])


def main() -> None:
    print("Other regimes: mean completion time of two workloads against the stored results")
    data = data_folder("pollux")
    if data is None:
        print("  skipped: the published workloads and profiles are missing (STRETTO_DATA)")
        return
    with ProcessPoolExecutor(2) as pool:
        futures = [[pool.submit(ratio, data, regime, one) for one in WORKLOADS] for regime in REGIMES]
        for regime, row in zip(REGIMES, futures, strict=True):
            ours, stored = np.mean([future.result() for future in row], axis=0)
            print(f"  {regime.name:44s} {ours:6.0f} s, stored {stored:6.0f} s: x{ours / stored:.3f}")


if __name__ == "__main__":
    main()
