"""On the published clock the published baselines come out as published, where the files are at hand."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.simulation.jobs import Setup, SimulationResult, simulate
from stretto.worlds.applications import Applications
from stretto.worlds.measured import load_profiles
from stretto.worlds.workload_files import read_workload

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("STRETTO_DATA", ROOT.parent / "shared" / "data")) / "pollux"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DATA / "results-jobload").is_dir(), reason=f"no published results at {DATA} (set STRETTO_DATA)"
    ),
]

WORKLOADS = [f"workload-{number}" for number in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def profiles() -> Applications:
    return load_profiles([DATA / "traces"])


def published(policy: str) -> Any:
    with gzip.open(DATA / "results-jobload" / f"{policy}-1.0" / "summary.json.gz", "rt") as file:
        return json.load(file)


def rerun(policy: str, workload: str, profiles: Applications) -> SimulationResult:
    jobs = read_workload(DATA / "workloads" / f"{workload}.csv", profiles)
    return simulate(jobs, policy, Setup(rounds=True))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_tiresias_gives_every_job_its_published_completion_time(
    workload: str, profiles: Applications
) -> None:
    run = rerun("tiresias", workload, profiles)
    ours = {job_id: job.jct_s for job_id, job in run.history.jobs.items()}
    assert len(ours) == 160
    assert ours == published("tiresias")["jcts"][workload]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_optimus_oracle_is_within_a_hundredth_on_average(workload: str, profiles: Applications) -> None:
    run = rerun("optimus-oracle", workload, profiles)
    assert run.metrics.completed == 160
    assert run.metrics.mean_jct_s == pytest.approx(published("optimus")["avgs"][workload], rel=0.01)
