"""Pollux against Optimus with an oracle, at light and heavy load."""

from __future__ import annotations

import pytest

from stretto.core.cluster import gpu_nodes
from stretto.core.seeds import child_rng
from stretto.simulation.jobs import Setup, simulate
from stretto.worlds.synthetic import synthetic_workload

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("load", [0.5, 1.0, 1.5, 2.0])
def test_p8_pollux_finishes_jobs_sooner_than_optimus_with_an_oracle(load: float) -> None:
    workload = synthetic_workload(child_rng(1, "loads"), jobs=round(14 * load), hours=2.0)
    setup = Setup(nodes=gpu_nodes(3, 4), rounds=True)
    pollux = simulate(workload, "pollux", setup).metrics
    oracle = simulate(workload, "optimus-oracle", setup).metrics
    assert pollux.completed == oracle.completed == len(workload.jobs)
    assert pollux.mean_jct_s is not None
    assert oracle.mean_jct_s is not None
    assert pollux.mean_jct_s <= oracle.mean_jct_s
