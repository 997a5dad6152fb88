"""Nodes of a real Ray cluster that the user's commands bring up: `ray start` processes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

ray = pytest.importorskip("ray")

from launch_bench import TWO, alive, collected, two_came, unseen, wish  # noqa: E402
from live_processes import eventually, running_with  # noqa: E402
from local_bench import STUB  # noqa: E402
from ray_bench import LIGHT, small_cluster  # noqa: E402
from stretto import tune  # noqa: E402
from stretto.core.cluster import Node, Wish  # noqa: E402
from stretto.core.errors import InputError  # noqa: E402
from stretto.core.events import (  # noqa: E402
    Decided,
    Event,
    NodeAdded,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunPaused,
)
from stretto.core.resources import Resources  # noqa: E402
from stretto.inputs.profile import read_profile  # noqa: E402
from stretto.journal.folds.nodes import HOPELESS  # noqa: E402
from stretto.runs.folder import RunFolder  # noqa: E402
from stretto.substrate.fleet.commands import Commands  # noqa: E402
from stretto.substrate.ray.fleet import NodePool, RayFleet  # noqa: E402
from stretto.substrate.ray.launch_commands import CommandLauncher  # noqa: E402
from stretto.substrate.ray.nodes import RayNode, read_nodes  # noqa: E402
from stretto.substrate.ray.substrate import RaySubstrate  # noqa: E402
from tune_world import STUDY, write_study  # noqa: E402

Told = TypeVar("Told")

OURS = f"t{os.getpid()}-"
"""Begins the names of this test's nodes: others may run at the same time."""
RAY = Path(sys.executable).with_name("ray")
START = (
    f"{RAY} start --block --address={{address}} --num-cpus=1 --num-gpus={{slots}} "
    f"--object-store-memory={LIGHT['object_store_memory']} --disable-usage-stats "
    f"--temp-dir=/tmp/{OURS}{{number}} "  # on one machine, nodes that start together must not share it
    "--labels=stretto-node={name},stretto-instance={instance}"
)


class Watch:
    """A fleet that is looked at until something happens."""

    def __init__(self, launcher: CommandLauncher | None, began_s: float, **options: Any) -> None:
        self.began_s = began_s
        self.events: list[Event] = []
        self.fleet = RayFleet(launcher, resource="GPU", look_s=0.1, prefix=OURS, **options)

    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def wish(self, wished: Wish) -> float:
        """When that was."""
        t_s = self.now_s()
        self.events.append(
            Decided(t_s=t_s, policy="t", instructions=(), reasons={}, memory=None, wish=wished)
        )
        self.events += self.fleet.provision(wished, t_s)
        self.events += self.fleet.release(wished.release, t_s)
        return t_s

    def until(self, there: Callable[[], bool], within_s: float = 180.0) -> None:
        def looked() -> bool:
            self.events += self.fleet.look(self.now_s())
            return there()

        assert eventually(looked, within_s=within_s), "\n".join(map(str, self.events))

    def close(self) -> None:
        self.fleet.close()

    def of(self, kind: type[Told]) -> list[Told]:
        return [event for event in self.events if isinstance(event, kind)]


def raylet_of(node: str) -> int:
    """The process of a node's raylet. One that it has forked looks the same until it runs its own program."""
    found: list[int] = []

    def only_one() -> bool:
        found[:] = [int(line.split()[0]) for line in running_with(node) if "raylet/raylet" in line]
        return len(found) == 1

    assert eventually(only_one), found
    return found[0]


def launcher(folder: Path, launch: str = START, release: str = "") -> CommandLauncher:
    address = ray.get_runtime_context().gcs_address
    return CommandLauncher(Commands(launch=launch, release=release), [TWO], address=address, folder=folder)


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    with small_cluster(gpus=()):
        yield
    for folder in Path("/tmp").glob(f"{OURS}*"):  # noqa: S108 - sockets need short paths
        shutil.rmtree(folder)


@pytest.mark.usefixtures("_cluster")
def test_nodes_are_launched_lost_given_back_and_found_again(tmp_path: Path) -> None:
    with closing(Watch(launcher(tmp_path), time.monotonic())) as watch:
        _live_through(watch, tmp_path)


def _live_through(watch: Watch, folder: Path) -> None:
    assert watch.fleet.nodes() == ()
    wished_s = watch.wish(wish(3))
    assert [event.node.id for event in watch.of(NodeLaunched)] == [
        f"{OURS}two-1",
        f"{OURS}two-2",
        f"{OURS}two-3",
    ]
    watch.until(lambda: len(watch.of(NodeAdded)) == 3)
    for added in watch.of(NodeAdded):
        assert (added.node.gpus, added.node.instance) == (2, "two")
        assert added.queue_s >= 0.0
        assert added.init_s > 0.0
        assert added.queue_s + added.init_s == pytest.approx(added.t_s - wished_s)

    found = watch.fleet.where(f"{OURS}two-1")
    assert found is not None
    assert running_with(f"{OURS}two-1")
    watch.wish(wish(2, f"{OURS}two-1"))
    assert watch.of(NodeReleased)[-1].node_id == f"{OURS}two-1"
    watch.until(lambda: not running_with(f"{OURS}two-1"))
    watch.until(lambda: found.ray_id not in {node.ray_id for node in read_nodes("GPU")})
    assert watch.fleet.where(f"{OURS}two-1") is None
    assert not watch.of(NodeLost)

    os.kill(raylet_of(f"{OURS}two-2"), signal.SIGKILL)
    watch.until(lambda: bool(watch.of(NodeLost)))
    assert [event.node_id for event in watch.of(NodeLost)] == [f"{OURS}two-2"]
    watch.until(
        lambda: not (folder / f"{OURS}two-2.json").exists()
    )  # nobody ends it when somebody else looks

    # The controller is killed and another one goes on: the third node is still there, and can be ended.
    with closing(Watch(launcher(folder), watch.began_s)) as again:
        again.events += again.fleet.recall(watch.events, again.now_s())
        assert again.events == []
        assert again.fleet.where(f"{OURS}two-3") is not None
    assert eventually(lambda: not running_with(f"{OURS}two-"))
    kept = {path.name for path in folder.iterdir()}
    assert kept <= {f"{OURS}two-2.log"}, "why that one died"


@pytest.mark.usefixtures("_cluster")
def test_a_launch_that_fails_is_refused_with_what_the_command_said(tmp_path: Path) -> None:
    made = launcher(tmp_path, launch="sh -c 'echo no quota for {instance} >&2; exit 3'")
    watch = Watch(made, time.monotonic())
    watch.wish(wish(2))
    watch.until(lambda: sum(event.count for event in watch.of(NodeRefused)) == 2)
    why, _, log = watch.of(NodeRefused)[0].why.removesuffix(")").partition(" (log: ")
    assert why == "its launch command ended with exit code 3: no quota for two"
    launched = {event.node.id for event in watch.of(NodeLaunched)}
    assert {event.node_id for event in watch.of(NodeReleased)} == launched
    assert all(event.never_came for event in watch.of(NodeReleased)), "what does not come does not cost"
    watch.close()
    assert Path(log).read_text() == "no quota for two\n"
    assert {path.suffix for path in tmp_path.iterdir()} == {".log"}


@pytest.mark.usefixtures("_cluster")
def test_a_study_whose_launches_all_fail_ends_with_what_they_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.policies.rubberband.turn.FIRST_PAUSE_S", 0.02)
    instance = '[[cluster.instance]]\nname = "two"\ngpus = 2\nusd_per_hour = 3.6\n'
    launch = "sh -c 'echo no quota for {instance} {name} >&2; exit 3'"
    text = STUDY.replace('"tiny"', f'"{OURS}vain"').replace("slots = 2", "")
    study = write_study(tmp_path, f'{text}[cluster]\nmax_nodes = 2\n{instance}[ray]\nlaunch = "{launch}"\n')
    for tries in (HOPELESS, HOPELESS + 1):  # the same command goes on, and tries once more
        with pytest.raises(InputError, match=f"no quota for two {OURS}vain-two-") as error:
            tune(study, "train.py:train", policy="rubberband", on="ray", deadline=3600.0)
        assert "6 times in a row" in error.value.problem
        assert "re-run the same command" in error.value.remedy
        events = list(RunFolder(tmp_path / "runs" / f"{OURS}vain").events())
        wished = [e.wish for e in events if isinstance(e, Decided) and e.wish and e.wish.count("two")]
        assert len(wished) == tries
        assert isinstance(events[-1], RunPaused)


@pytest.mark.usefixtures("_cluster")
def test_a_study_is_measured_on_a_node_that_is_launched_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.driving.ray_open.RaySubstrate", partial(RaySubstrate, trainer=STUB))
    monkeypatch.setattr("stretto.profiling.probe_data.PROBE_S", 3.0)
    text = STUDY[: STUDY.index("[profile]")].replace('"tiny"', f'"{OURS}run"').replace("slots = 2", "")
    text = text.replace("trials = 6", "trials = 2")
    instance = '[[cluster.instance]]\nname = "two"\ngpus = 2\nusd_per_hour = 3.6\n'
    study = write_study(tmp_path, f"{text}[cluster]\nmax_nodes = 1\n{instance}[ray]\nlaunch = '{START}'\n")
    result = tune(study, "train.py:train", policy="rubberband", on="ray", deadline=900.0)
    assert result.succeeded
    folder = RunFolder(result.run)
    measured = read_profile(folder.profile)
    assert measured.node is not None
    assert (measured.slots, measured.node.instance) == (2, "two")
    assert measured.node.init_s > 0.0
    launched = [event.node.id for event in folder.events() if isinstance(event, NodeLaunched)]
    assert launched[0] == f"{OURS}run-two-1", "not the one that it was measured on"
    assert result.cost_usd >= measured.node.cost_usd + 0.06, "a minute of a node, at least, for each"
    assert eventually(lambda: not running_with(f"{OURS}run-"))
    assert list(folder.nodes.iterdir()) == []


def test_a_fixed_cluster_tells_of_nodes_that_join_and_refuses_wishes() -> None:
    there: list[RayNode] = []
    broken: list[str] = []
    failed: list[str] = []

    def read(resource: object) -> list[RayNode]:
        assert resource == "CPU"
        if broken:
            failed.append(broken[0])
            raise ConnectionError(broken[0])
        return list(there)

    fleet = RayFleet(resource="CPU", look_s=0.02, read=read, connected=lambda: True)
    assert fleet.nodes() == ()
    (refused,) = fleet.provision(wish(1), 0.0)
    assert isinstance(refused, NodeRefused)
    there.append(alive("nab"))
    (added,) = collected(lambda: fleet.look(1.0), 1)
    assert isinstance(added, NodeAdded)
    assert fleet.where("nab") == there[0]
    broken.append("Ray is away for a moment")
    assert eventually(lambda: len(failed) > 1)
    assert fleet.look(2.0) == [], "silence is no sign that a node is gone"
    broken.clear()
    there.clear()
    assert collected(lambda: fleet.look(3.0), 1) == [NodeLost(t_s=3.0, node_id="nab")]
    fleet.close()


def test_nodes_that_came_or_went_before_the_fleet_was_there_are_told() -> None:
    first = [Node(name, Resources(gpu=2)) for name in ("na", "nb")]
    there = (alive("nb"), alive("nc"))
    fleet = RayFleet(nodes=first, resource="CPU", read=lambda _: there, connected=lambda: True)
    assert fleet.nodes() == tuple(first)
    assert (fleet.where("na"), fleet.where("nb")) == (None, alive("nb"))
    assert fleet.look(1.0) == [
        NodeLost(t_s=1.0, node_id="na"),
        NodeAdded(t_s=1.0, node=Node("nc", Resources(gpu=2))),
    ]
    fleet.close()


def test_a_node_of_a_pool_that_is_given_up_is_not_taken_again() -> None:
    pool = NodePool(TWO)
    fleet = unseen(pool, alive("na", "two"))
    fleet.look(0.0)
    assert any(isinstance(event, NodeAdded) for event in fleet.provision(wish(1), 1.0))
    assert fleet.give_up("two-1", 2.0) == []
    assert fleet.where("two-1") is None
    assert fleet.look(3.0) == []
    fleet.provision(wish(1), 4.0)
    (refused,) = collected(lambda: fleet.look(5.0), 1)
    assert isinstance(refused, NodeRefused)
    fleet.close()


def test_what_a_pool_still_owed_is_taken_or_refused_when_a_run_goes_on() -> None:
    fleet = unseen(NodePool(TWO), alive("na", "two"))
    history = two_came()[:3]
    assert [event.kind for event in fleet.recall(history, 9.0)] == ["node-added"]
    assert [event.kind for event in collected(lambda: fleet.look(10.0), 2)] == [
        "node-released",
        "node-refused",
    ]
    fleet.close()


def test_without_the_node_it_belongs_to_a_run_ends_with_a_remedy() -> None:
    fleet = RayFleet(resource="CPU", look_s=0.01, read=lambda _: (), connected=lambda: False)
    assert eventually(lambda: fleet._cut_off)
    with pytest.raises(InputError, match="on another node"):
        fleet.look(0.0)
    fleet.close()
