"""Nodes of a Ray cluster are killed and added under running jobs; `benchmarks/ray_faults.py` has fifty."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from live_processes import eventually
from local_bench import job_of
from ray_bench import RayBench, SmallCluster, raylet_of, small_cluster
from ray_fault_inject import Kind, Storm
from ray_fault_judge import groups, leaks, problems
from ray_fault_run import RayRun
from stretto.core.allocation import on_nodes
from stretto.core.events import JobFinished, JobReported, NodeLost
from stretto.core.instructions import Action
from stretto.substrate.elastic.reports import Held, TrainingAccount
from stretto.wire.messages import EpochEnd, Report

FAULTS = (Kind.POWER, Kind.ADD, Kind.AGENT, Kind.RAYLET, Kind.WORKER)
GPUS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster((GPUS, GPUS)) as small:
        yield small


def test_a_job_that_waits_for_its_leases_when_their_node_dies_goes_on_elsewhere(
    tmp_path: Path, cluster: SmallCluster
) -> None:
    stays, dies = cluster.raylets
    bench = RayBench(tmp_path)
    os.kill(raylet_of(cluster.raylets[dies]), signal.SIGSTOP)
    bench.start("a", on_nodes({dies: 2}))
    assert eventually(lambda: len(groups()) == 2), "nobody can sit down where nobody answers"
    cluster.kill(dies)
    bench.wait_for_kind(NodeLost, dies)
    bench.tell(Action.START, "a", on_nodes({stays: 1}))
    bench.wait_for_kind(JobFinished, "a")
    bench.substrate.close()
    assert list(leaks(tmp_path)) == []
    cluster.add(GPUS)


def test_epochs_that_were_ended_by_a_group_that_was_cut_off_are_told() -> None:
    def held(epoch: int, *ends: int) -> Held:
        told = tuple(EpochEnd(epoch=end, values={"loss": float(end)}, epoch_s=None) for end in ends)
        return Held(Report(progress=epoch, epoch=epoch, steps=0, ends=told), workers=1, nodes=1)

    account = TrainingAccount(
        job_of("a"), None, 2, written=lambda epoch, _: [held(e, e) for e in range(epoch + 1, 9)]
    )
    account.held = [held(4), held(5, 5), held(6, 6)]
    told = [
        one.epoch for event in account.tell(t_s=0.0) if isinstance(event, JobReported) for one in event.losses
    ]
    assert told == [3, 4, 5, 6]


def test_jobs_come_to_their_end_whatever_happens_to_nodes(
    tmp_path: Path, cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = RayRun(tmp_path / "run", at_once=3, epochs=6, nap_s=0.1, checkpoint_every_s=0.5)
    storm = Storm(run, cluster, gpus=GPUS, seed=0)
    storm.rage(FAULTS)
    assert [fault.kind for fault in storm.faults] == list(FAULTS)
    assert [*storm.problems, *problems(run, storm.faults)] == []
