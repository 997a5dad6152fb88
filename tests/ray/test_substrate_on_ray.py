"""Jobs on a real Ray cluster of several nodes: the conformance suite, and what only a cluster can do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from live_processes import eventually, running_with  # noqa: E402
from local_bench import BATCH, job_of  # noqa: E402
from ray_bench import RayBench, SmallCluster, small_cluster  # noqa: E402
from stretto.core.allocation import BatchChoice, on_nodes  # noqa: E402
from stretto.core.cluster import Node  # noqa: E402
from stretto.core.errors import InputError  # noqa: E402
from stretto.core.events import (  # noqa: E402
    Decided,
    Event,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeAdded,
    NodeLost,
    RunStarted,
)
from stretto.core.instructions import Action, Instruction  # noqa: E402
from stretto.core.job import Value  # noqa: E402
from stretto.core.resources import Resources  # noqa: E402
from stretto.substrate.ray.ground import RayGround  # noqa: E402
from stretto.substrate.ray.nodes import read_nodes  # noqa: E402
from stretto.testing.substrates import Sketch, SubstrateCase, SubstrateConformance  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster() as small:
        yield small


@pytest.fixture
def nodes(cluster: SmallCluster) -> list[str]:
    return sorted(cluster.raylets)


def held() -> dict[str, int]:
    """Seats by node, as Ray's books have them."""
    groups = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    ids = [node_id for one in groups for node_id in one["bundles_to_node_id"].values()]
    return dict(Counter(f"n{node_id[:10]}" for node_id in ids))


def actors() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


@pytest.mark.usefixtures("cluster")
class TestConformance(SubstrateConformance):
    until: Mapping[str, Value] = {}
    """The change that jobs wait for half-way."""

    def open(self, sketches: tuple[Sketch, ...], folder: Path) -> SubstrateCase:
        fails = {sketch.id: sketch.fails for sketch in sketches}

        def config(job_id: str) -> dict[str, Value]:
            slow: dict[str, Value] = {"step_s": 0.08, **self.until}
            return {**slow, "trouble": "raise", "at_step": 14} if fails[job_id] else slow

        first, second = sorted(node.name for node in read_nodes())
        return SubstrateCase(
            substrate=RayBench(folder, config=config).substrate,
            jobs={sketch.id: job_of(sketch.id) for sketch in sketches},
            small=on_nodes({first: 1}),
            large=on_nodes({first: 1, second: 1}),
            batch=BATCH,
            other_batch=BatchChoice(32),
            tick_s=0.5,
            patience_s=180.0,
        )

    def leftovers(self, folder: Path) -> list[str]:
        eventually(lambda: not running_with(str(folder)), within_s=60.0)
        return running_with(str(folder))

    def test_a_resize_keeps_the_work_done(self, tmp_path: Path) -> None:
        self.until = {"until_workers": 2}
        super().test_a_resize_keeps_the_work_done(tmp_path)

    def test_a_new_batch_size_keeps_the_work_done(self, tmp_path: Path) -> None:
        self.until = {"until_batch": 32}
        super().test_a_new_batch_size_keeps_the_work_done(tmp_path)


def test_workers_are_on_the_nodes_that_were_decided_and_leases_are_given_back(
    tmp_path: Path, nodes: list[str]
) -> None:
    bench = RayBench(tmp_path, epochs=4000, idle_s=0.0)
    first, second = nodes
    bench.start("a", on_nodes({first: 1, second: 2}))
    bench.wait_for_kind(JobReported, "a")
    assert held() == {first: 1, second: 2}
    bench.tell(Action.RESIZE, "a", on_nodes({second: 1}))
    assert eventually(lambda: held() == {second: 1}, within_s=120.0), held()
    bench.tell(Action.RESIZE, "a", on_nodes({first: 2}))
    assert eventually(lambda: held() == {first: 2}, within_s=120.0), held()
    bench.substrate.close()
    assert eventually(lambda: not held() and not actors()), (held(), actors())


def finish(bench: RayBench, *jobs: str) -> None:
    for job_id in jobs:
        if not any(isinstance(e, JobFinished) and e.job_id == job_id for e in bench.events):
            bench.wait_for_kind(JobFinished, job_id)


def ground_of(bench: RayBench) -> RayGround:
    ground = bench.substrate._land
    assert isinstance(ground, RayGround)
    return ground


def slowly(_: str) -> dict[str, Value]:
    return {"step_s": 0.05}


def test_a_node_that_dies_strands_its_jobs_which_go_on_elsewhere(
    tmp_path: Path, cluster: SmallCluster, nodes: list[str]
) -> None:
    stays, dies = nodes
    bench = RayBench(tmp_path, epochs=20, config=slowly)
    bench.start("a", on_nodes({stays: 1, dies: 1}))
    bench.start("b", on_nodes({stays: 1}))
    bench.wait_for_kind(JobReported, "a")
    cluster.kill(dies)
    bench.wait_for_kind(NodeLost, dies)
    bench.tell(Action.START, "a", on_nodes({stays: 1}))
    finish(bench, "a", "b")
    assert not [event for event in bench.events if isinstance(event, JobRetried)], "no job was to blame"
    new = cluster.add()
    bench.wait_for_kind(NodeAdded, new)
    bench.start("c", on_nodes({new: 2}))
    finish(bench, "c")
    bench.substrate.close()
    assert eventually(lambda: not held() and not actors()), (held(), actors())


def test_a_node_whose_agent_dies_is_lost_and_found(tmp_path: Path, nodes: list[str]) -> None:
    bench = RayBench(tmp_path, epochs=20, config=slowly)
    bench.start("a", on_nodes({nodes[0]: 1}))
    bench.wait_for_kind(JobReported, "a")
    ray.kill(ground_of(bench)._agents[nodes[0]]._actor)
    bench.wait_for_kind(NodeAdded, nodes[0])
    assert [e.subject for e in bench.events if isinstance(e, NodeLost)].count(nodes[0]) == 1
    bench.tell(Action.START, "a", on_nodes({nodes[0]: 1}))
    finish(bench, "a")
    bench.substrate.close()
    assert eventually(lambda: not running_with(str(tmp_path))), running_with(str(tmp_path))


def test_a_worker_that_loses_its_lease_is_started_again(tmp_path: Path, nodes: list[str]) -> None:
    bench = RayBench(tmp_path, epochs=40, config=slowly)
    bench.start("a", on_nodes({nodes[0]: 1}))
    bench.wait_for_kind(JobReported, "a")
    (lease,) = ground_of(bench)._leases._leases.values()
    ray.kill(lease.holder)
    retried = bench.wait_for_kind(JobRetried, "a")
    assert isinstance(retried, JobRetried)
    assert "Ray took its place away" in retried.error
    finish(bench, "a")
    bench.substrate.close()


def test_a_worker_that_is_killed_is_started_again_where_it_was(tmp_path: Path, nodes: list[str]) -> None:
    trouble: dict[str, Value] = {"trouble": "die", "at_step": 12, "once": True}
    bench = RayBench(tmp_path, config=lambda _: trouble)
    bench.start("a", on_nodes({nodes[0]: 1, nodes[1]: 1}))
    bench.wait_for_kind(JobRetried, "a")
    finish(bench, "a")
    bench.substrate.close()


def test_a_folder_that_nodes_do_not_see_is_an_error_with_a_remedy(tmp_path: Path, nodes: list[str]) -> None:
    bench = RayBench(tmp_path)
    (tmp_path / "id").write_text("somebody else's")
    bench.start("a", on_nodes({nodes[0]: 1}))
    with pytest.raises(InputError, match=r"does not see the run's folder.*--store"):
        bench.wait_for_kind(JobFinished, "a")
    bench.substrate.stop_now()


def test_epochs_that_are_finished_end_the_waiting(tmp_path: Path, nodes: list[str]) -> None:
    bench = RayBench(tmp_path, epochs=400, config=slowly)
    bench.start("a", on_nodes({nodes[0]: 1}))
    bench.wait_for_kind(JobReported, "a")
    bench.substrate.finish_epochs()
    while bench.substrate.next_event(math.inf) is not None:
        pass
    bench.substrate.close()


def test_a_new_controller_does_not_start_jobs_on_nodes_that_are_gone(
    tmp_path: Path, cluster: SmallCluster
) -> None:
    stays = min(cluster.raylets)
    dies = cluster.add(1)
    job = job_of("a")
    nodes = tuple(Node(name, Resources(gpu=1)) for name in (stays, dies))
    instruction = Instruction(1, Action.START, "a", on_nodes({stays: 1, dies: 1}), BATCH)
    history: list[Event] = [
        RunStarted(t_s=0.0, identity={"policy": "test"}, nodes=nodes),
        JobSubmitted(t_s=0.0, job=job),
        Decided(t_s=0.0, policy="test", instructions=(instruction,), reasons={}, memory=None),
    ]
    cluster.kill(dies)
    assert eventually(lambda: dies not in {node.name for node in read_nodes()}, within_s=120.0)
    bench = RayBench(tmp_path)
    bench.substrate.recover(history)
    bench.wait_for_kind(NodeLost, dies)
    assert eventually(lambda: not bench.substrate._gangs["a"].busy)
    bench.substrate.close()
