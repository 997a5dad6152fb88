"""Nodes of a real Ray cluster that the user's commands bring up: `ray start` processes on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

ray = pytest.importorskip("ray")

from live_processes import eventually, running_with  # noqa: E402
from local_bench import STUB  # noqa: E402
from ray_bench import LIGHT, small_cluster  # noqa: E402
from stretto import tune  # noqa: E402
from stretto.app.profile_file import read_profile  # noqa: E402
from stretto.app.run_folder import RunFolder  # noqa: E402
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
)
from stretto.core.resources import Resources  # noqa: E402
from stretto.substrate.fleet_commands import Commands  # noqa: E402
from stretto.substrate.fleet_nodes import NodeKind  # noqa: E402
from stretto.substrate.ray import launch_commands  # noqa: E402
from stretto.substrate.ray.fleet import RayFleet  # noqa: E402
from stretto.substrate.ray.launch import AutoscalerLauncher, Began, Failed  # noqa: E402
from stretto.substrate.ray.launch_commands import CommandLauncher  # noqa: E402
from stretto.substrate.ray.nodes import RayNode, read_nodes  # noqa: E402
from stretto.substrate.ray.pool import Pool  # noqa: E402
from stretto.substrate.ray.substrate import RaySubstrate  # noqa: E402
from tune_world import STUDY, write_study  # noqa: E402

Told = TypeVar("Told")

TWO = NodeKind("two", 2)
OURS = f"t{os.getpid()}-"
"""Begins the names of this test's nodes: others may run at the same time."""
RAY = Path(sys.executable).with_name("ray")
START = (
    f"{RAY} start --block --address={{address}} --num-cpus=1 --num-gpus={{slots}} "
    f"--object-store-memory={LIGHT['object_store_memory']} --disable-usage-stats "
    f"--temp-dir=/tmp/{OURS}{{number}} "  # on one machine, nodes that start together must not share it
    "--labels=stretto-node={name},stretto-instance={instance}"
)


def wish(count: int, *release: str) -> Wish:
    return Wish((("two", count),), release)


class Watch:
    """A fleet that is looked at until something happens."""

    def __init__(self, launcher: CommandLauncher | None, began_s: float, **options: Any) -> None:
        self.began_s = began_s
        self.events: list[Event] = []
        self.fleet = RayFleet(launcher, resource="GPU", look_s=0.1, prefix=OURS, **options)

    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def wish(self, wished: Wish) -> None:
        self.events.append(
            Decided(t_s=self.now_s(), policy="t", instructions=(), reasons={}, memory=None, wish=wished)
        )
        self.events += self.fleet.provision(wished, self.now_s())
        self.events += self.fleet.release(wished.release, self.now_s())

    def until(self, there: Callable[[], bool], within_s: float = 60.0) -> None:
        def looked() -> bool:
            self.events += self.fleet.look(self.now_s())
            return there()

        assert eventually(looked, within_s=within_s), "\n".join(map(str, self.events))

    def close(self) -> None:
        self.fleet.close()

    def of(self, kind: type[Told]) -> list[Told]:
        return [event for event in self.events if isinstance(event, kind)]


def alive(name: str, instance: str = "") -> RayNode:
    return RayNode(ray_id=f"id-{name}", name=name, host="h", slots=2, instance=instance, draining=False)


def unseen(launcher: CommandLauncher | AutoscalerLauncher | Pool, *there: RayNode) -> RayFleet:
    """A fleet in a cluster that is made up."""
    return RayFleet(launcher, resource="GPU", read=lambda _: there, connected=lambda: True)


def two_came() -> list[Event]:
    """The record of a run that has two nodes."""
    nodes = [Node(f"two-{number}", Resources(gpu=2), "two") for number in (1, 2)]
    return [
        Decided(t_s=0.0, policy="t", instructions=(), reasons={}, memory=None, wish=wish(2)),
        *(NodeLaunched(t_s=1.0, node=node) for node in nodes),
        *(NodeAdded(t_s=2.0, node=node) for node in nodes),
    ]


def collected(more: Callable[[], Sequence[Told]], count: int) -> list[Told]:
    """What is said until there are so many things."""
    found: list[Told] = []

    def enough() -> bool:
        found.extend(more())
        return len(found) >= count

    assert eventually(enough), found
    return found


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
    watch.wish(wish(3))
    assert [event.node.id for event in watch.of(NodeLaunched)] == [
        f"{OURS}two-1",
        f"{OURS}two-2",
        f"{OURS}two-3",
    ]
    watch.until(lambda: len(watch.of(NodeAdded)) == 3)
    for added in watch.of(NodeAdded):
        assert (added.node.gpus, added.node.instance) == (2, "two")
        assert 0.0 <= added.queue_s <= added.t_s
        assert 0.0 < added.init_s <= added.t_s
        assert added.queue_s + added.init_s == pytest.approx(added.t_s, abs=1.0)

    found = watch.fleet.where(f"{OURS}two-1")
    assert found is not None
    assert running_with(f"{OURS}two-1")
    watch.wish(wish(2, f"{OURS}two-1"))
    assert watch.of(NodeReleased)[-1].node_id == f"{OURS}two-1"
    watch.until(lambda: not running_with(f"{OURS}two-1"))
    watch.until(lambda: found.ray_id not in {node.ray_id for node in read_nodes("GPU")})
    assert watch.fleet.where(f"{OURS}two-1") is None
    assert not watch.of(NodeLost)

    (raylet,) = [int(line.split()[0]) for line in running_with(f"{OURS}two-2") if "raylet/raylet" in line]
    os.kill(raylet, signal.SIGKILL)
    watch.until(lambda: bool(watch.of(NodeLost)))
    assert [event.node_id for event in watch.of(NodeLost)] == [f"{OURS}two-2"]

    # The controller is killed and another one goes on: the third node is still there, and can be ended.
    again = Watch(launcher(folder), watch.began_s)
    again.events += again.fleet.recall(watch.events, again.now_s())
    assert again.events == []
    assert again.fleet.where(f"{OURS}two-3") is not None
    again.close()
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
def test_a_study_is_measured_on_a_node_that_is_launched_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.app.real_ray_open.RaySubstrate", partial(RaySubstrate, trainer=STUB))
    monkeypatch.setattr("stretto.app.tune.PROBE_S", 3.0)
    text = STUDY[: STUDY.index("[profile]")].replace('"tiny"', f'"{OURS}run"').replace("slots = 2", "")
    text = text.replace("trials = 6", "trials = 2")
    instance = '[[cluster.instance]]\nname = "two"\ngpus = 2\nusd_per_hour = 3.6\n'
    study = write_study(tmp_path, f"{text}[cluster]\nmax_nodes = 1\n{instance}[ray]\nlaunch = '{START}'\n")
    result = tune(study, "train.py:train", policy="rubberband", on="ray", deadline=300.0)
    assert result.succeeded
    folder = RunFolder(result.run)
    measured = read_profile(folder.profile)
    assert measured.node is not None
    assert (measured.slots, measured.node.instance) == (2, "two")
    assert 0.0 < measured.node.init_s < 60.0
    launched = [event.node.id for event in folder.events() if isinstance(event, NodeLaunched)]
    assert launched[0] == f"{OURS}run-two-1", "not the one that it was measured on"
    assert result.cost_usd >= measured.node.cost_usd + 0.06, "a minute of a node, at least, for each"
    assert not running_with(f"{OURS}run-")
    assert list(folder.nodes.iterdir()) == []


def test_a_fixed_cluster_tells_of_nodes_that_join_and_refuses_wishes() -> None:
    there: list[RayNode] = []
    broken: list[str] = []

    def read(resource: object) -> list[RayNode]:
        assert resource == "CPU"
        if broken:
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
    time.sleep(0.1)
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
    pool = Pool(TWO)
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
    fleet = unseen(Pool(TWO), alive("na", "two"))
    history = two_came()[:3]
    assert [event.kind for event in fleet.recall(history, 9.0)] == ["node-added"]
    assert [event.kind for event in collected(lambda: fleet.look(10.0), 2)] == [
        "node-released",
        "node-refused",
    ]
    fleet.close()


class TestCommands:
    """Launch commands of all sorts, without a cluster."""

    @staticmethod
    def launcher(folder: Path, launch: str, release: str = "") -> CommandLauncher:
        commands = Commands(launch=launch, release=release)
        return CommandLauncher(commands, [TWO], address="head:1", folder=folder / "nodes", grace_s=0.3)

    @pytest.mark.parametrize(
        ("launch", "release", "says"),
        [
            ("ray start --address={adress}", "", "{adress}"),
            ("ray start {ray_id}", "", "{ray_id}"),
            ("ray start", "ray stop {}", "{}"),
            ("ray start 'oops", "", "cannot be read"),
            ("ray start {name", "", "cannot be read"),
            ("ray start {name:d}", "", "'ray start {name:d}' cannot be filled in"),
            ("ray start", "ray stop {number:{width}}", "cannot be filled in"),
            (" ", "", "empty"),
        ],
    )
    def test_placeholders_are_checked_beforehand(self, launch: str, release: str, says: str) -> None:
        with pytest.raises(InputError, match=re.escape(says)):
            Commands(launch=launch, release=release)

    def test_a_command_gets_its_values_and_the_lowest_free_number(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        told = "{name} {instance} {slots} {number} {address}"
        made = self.launcher(
            tmp_path, f"sh -c 'echo {told} >> {out}'", f"sh -c 'echo -{{number}} {{ray_id}} >> {out}'"
        )
        for name in ("two-1", "two-2"):
            made.launch(name, "two")
        assert collected(made.news, 2) == [Began("two-1"), Began("two-2")]
        assert eventually(lambda: out.exists() and len(out.read_text().splitlines()) == 2)
        made.release("two-1", "abc")
        made.close()
        assert made.news() == []
        made.launch("two-3", "two")
        assert eventually(lambda: len(out.read_text().splitlines()) == 4)
        lines = out.read_text().splitlines()
        assert sorted(lines[:2]) == ["two-1 two 2 1 head:1", "two-2 two 2 2 head:1"]
        assert lines[2:] == ["-1 abc", "two-3 two 2 1 head:1"]

    def test_a_program_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        made = self.launcher(tmp_path, "/nowhere/ray start")
        made.launch("two-1", "two")
        (failed,) = collected(made.news, 1)
        assert isinstance(failed, Failed)
        assert "/nowhere/ray cannot be run: No such file" in failed.why
        made.release("two-1", "")
        made.close()

    def test_processes_that_do_not_want_to_end_are_ended_also_by_a_later_controller(
        self, tmp_path: Path
    ) -> None:
        mark = f"sleep 98{os.getpid()}"
        stubborn = f"""sh -c 'trap "" TERM; {mark} & {mark}; wait'"""
        self.launcher(tmp_path, stubborn).launch("two-1", "two")
        assert eventually(lambda: len(running_with(mark)) >= 3)
        later = self.launcher(tmp_path, stubborn)
        later.release("two-1", "")
        later.close()
        assert eventually(lambda: not running_with(mark))
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_a_process_that_ended_before_anybody_looked_is_not_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch_commands, "_begun", lambda _: "")
        made = self.launcher(tmp_path, "true")
        made._grace_s = 3600.0
        made.launch("two-1", "two")
        made.release("two-1", "")
        made.close()
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_a_node_that_cannot_be_released_is_warned_about(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(launch_commands, "_RELEASE_PAUSE_S", 0.0)
        made = self.launcher(tmp_path, "true", "sh -c 'echo locked; false'")
        made.launch("two-1", "two")
        made.release("two-1", "")
        made.close()
        assert "two-1 may still be up" in caplog.text
        assert "locked" in caplog.text
        made.news()
        made.launch("two-2", "two")
        kept = json.loads((tmp_path / "nodes" / "two-2.json").read_text())
        assert kept["number"] == 2, "its number is not given to another"

    def test_a_launch_that_nobody_wrote_down_is_ended_when_the_run_goes_on(self, tmp_path: Path) -> None:
        mark = f"sleep 97{os.getpid()}"
        killed = self.launcher(tmp_path, mark)
        for name in ("two-1", "two-2", "two-3"):
            killed.launch(name, "two")
        fleet = unseen(self.launcher(tmp_path, mark), alive("two-1", "two"), alive("two-2", "two"))
        assert fleet.recall(two_came(), 9.0) == []
        assert eventually(lambda: len(running_with(mark)) == 2)
        assert eventually(lambda: not (tmp_path / "nodes" / "two-3.log").exists())
        assert sorted(path.stem for path in (tmp_path / "nodes").glob("*.json")) == ["two-1", "two-2"]
        fleet.close()
        assert not running_with(mark)

    def test_a_run_that_begins_ends_what_a_probe_of_it_left_when_it_was_killed(self, tmp_path: Path) -> None:
        mark = f"sleep 96{os.getpid()}"
        self.launcher(tmp_path, mark).launch("probe-two-1", "two")
        fleet = unseen(self.launcher(tmp_path, mark), alive("probe-two-1", "two"))
        fleet.provision(wish(1), 0.0)
        assert eventually(lambda: not (tmp_path / "nodes" / "probe-two-1.json").exists())
        assert eventually(lambda: len(running_with(mark)) == 1)
        fleet.provision(wish(1), 1.0)
        assert (tmp_path / "nodes" / "two-1.json").exists(), "its own it keeps"
        fleet.close()
        assert not running_with(mark)

    def test_a_release_that_failed_is_tried_again_at_the_end_and_when_a_run_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch_commands, "_RELEASE_PAUSE_S", 0.0)
        ready = tmp_path / "ready"
        release = f"sh -c 'test {{ray_id}} = abc && test -e {ready}'"
        made = self.launcher(tmp_path, "true", release)
        for name in ("two-1", "two-2"):
            made.launch(name, "two")
            made.release(name, "abc" if name == "two-1" else "unknown")
        assert eventually(lambda: not made.news() and len(made._unended) == 2)
        assert set(made.launched()) == {"two-1", "two-2"}
        ready.touch()
        made.close()
        assert [path.name for path in (tmp_path / "nodes").glob("*.json")] == ["two-2.json"]
        later = self.launcher(tmp_path, "true", "true")
        fleet = unseen(later)
        fleet.recall([], 9.0)
        fleet.close()
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_whoever_may_not_go_on_with_a_run_ends_nothing_of_it(self, tmp_path: Path) -> None:
        made = self.launcher(tmp_path, "true")
        made.launch("two-1", "two")
        unseen(self.launcher(tmp_path, "true")).close()
        assert (tmp_path / "nodes" / "two-1.json").exists()
        made.release("two-1", "")
        made.close()


class TestAutoscaler:
    """What Ray's autoscaler is asked, with a stub in its place."""

    def test_every_request_is_for_all_that_is_wanted(self) -> None:
        asked: list[tuple[list[dict[str, float]], list[dict[str, str]]]] = []
        made = AutoscalerLauncher([TWO], "GPU", request=lambda *request: asked.append(request))
        made.launch("two-1", "two")
        made.launch("two-2", "two")
        one, label = {"GPU": 2.0}, {"stretto-instance": "two"}
        assert eventually(lambda: bool(asked) and asked[-1] == ([one, one], [label, label]))
        assert made.news() == [Began("two-1"), Began("two-2")]
        made.release("two-1", "abc")
        assert eventually(lambda: asked[-1] == ([one], [label]))
        made.release("two-2", "")
        made.close()
        assert asked[-1] == ([], [])

    def test_a_run_that_goes_on_asks_for_what_it_has_too(self) -> None:
        asked: list[int] = []
        made = AutoscalerLauncher([TWO], "GPU", request=lambda bundles, _: asked.append(len(bundles)))
        fleet = unseen(made, alive("n7", "two"), alive("n8", "two"))
        assert fleet.recall(two_came(), 9.0) == []
        assert eventually(lambda: asked == [2])
        fleet.provision(wish(3), 10.0)
        assert eventually(lambda: asked[1:] == [3])
        fleet.close()
        assert asked[-1] == 0

    def test_where_it_cannot_be_asked_the_nodes_are_refused(self) -> None:
        def broken(bundles: object, selectors: object) -> None:
            raise ConnectionError(f"no line for {bundles} {selectors}")

        made = AutoscalerLauncher([TWO], "GPU", request=broken)
        made.launch("two-1", "two")
        (failed,) = collected(made.news, 1)
        assert isinstance(failed, Failed)
        assert "could not be asked: no line" in failed.why
        made.close()


def test_without_the_node_it_belongs_to_a_run_ends_with_a_remedy() -> None:
    fleet = RayFleet(resource="CPU", look_s=0.01, read=lambda _: (), connected=lambda: False)
    assert eventually(lambda: fleet._cut_off)
    with pytest.raises(InputError, match="on another node"):
        fleet.look(0.0)
    fleet.close()
