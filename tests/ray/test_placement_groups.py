"""The watch over placement groups, and leases that are CPUs of a real cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from live_processes import eventually  # noqa: E402
from ray_bench import LIGHT, RayBench, SmallCluster, small_cluster  # noqa: E402
from ray_fault_judge import groups, leaks  # noqa: E402
from stretto.core.allocation import on_nodes  # noqa: E402
from stretto.core.events import JobFinished, JobReported, JobRetried, NodeLost  # noqa: E402
from stretto.core.instructions import Action  # noqa: E402
from stretto.core.job import Value  # noqa: E402
from stretto.substrate.ray import placement as keepers  # noqa: E402
from stretto.substrate.ray.placement import GroupWatch  # noqa: E402


class Group:
    """As Ray's, as far as the watch knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = self

    def hex(self) -> str:
        return self.name


class Table:
    """Ray's table of groups, and what the watch tells of them."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.told: list[str] = []
        self.broken: set[str] = set()
        """Of these nothing can be known."""
        self.failed = threading.Event()
        self.checks = 0
        """How often the whole table was asked for."""
        self.watch = GroupWatch(state_of=self._state_of, created=self._created, check_s=0.01)

    def add(self, name: str) -> Any:
        group: Any = Group(name)
        self.states[name] = "PENDING"
        self.watch.add(
            group,
            on_ready=lambda: self.told.append(f"{name} ready"),
            on_lost=lambda: self.told.append(f"{name} lost"),
        )
        return group

    def _state_of(self, group: Any) -> str:
        if group.name in self.broken:
            self.failed.set()
            raise ConnectionError
        return self.states[group.name]

    def _created(self) -> set[str]:
        self.checks += 1
        return {name for name, state in self.states.items() if state == "CREATED"}

    def has_told(self, *what: str) -> bool:
        return eventually(lambda: self.told == list(what))

    def has_looked(self) -> bool:
        """Where a group is there: what was being looked at just now is over, and another look has begun."""
        before = self.checks
        return eventually(lambda: self.checks >= before + 2)


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.watch.close()
    assert not watches()


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watch of leases"]


def test_a_group_that_has_to_wait_holds_up_no_other(table: Table) -> None:
    assert not watches(), "there is nothing to watch"
    for name in ("one", "two", "three"):
        table.add(name)
    table.states["two"] = "CREATED"
    assert table.has_told("two ready")
    table.states["one"] = "CREATED"
    assert table.has_told("two ready", "one ready")
    assert len(watches()) == 1


def test_a_group_that_is_taken_away_is_told_once(table: Table) -> None:
    for name in ("removed", "moved", "stays"):
        table.add(name)
    table.states = dict.fromkeys(table.states, "CREATED")
    assert eventually(lambda: sorted(table.told) == ["moved ready", "removed ready", "stays ready"])
    table.states["removed"] = "REMOVED"
    assert eventually(lambda: table.told[3:] == ["removed lost"])
    table.states["moved"] = "RESCHEDULING"
    assert eventually(lambda: table.told[4:] == ["moved lost"])
    table.add("next")
    table.states["next"] = "CREATED"
    assert eventually(lambda: table.told[5:] == ["next ready"])


def test_a_group_that_is_taken_away_before_it_came_is_told(table: Table) -> None:
    table.add("one")
    table.states["one"] = "REMOVED"
    assert table.has_told("one lost")


def test_of_a_group_that_was_forgotten_nothing_is_told(table: Table) -> None:
    forgotten = [table.add("coming"), table.add("here")]
    table.states["here"] = "CREATED"
    assert table.has_told("here ready")
    table.add("stays")
    table.states["stays"] = "CREATED"
    assert table.has_told("here ready", "stays ready")
    for group in forgotten:
        table.watch.forget(group)
    assert table.has_looked(), "one that had begun may tell of them"
    table.states |= {"coming": "CREATED", "here": "REMOVED"}
    assert table.has_looked()
    assert table.told == ["here ready", "stays ready"]


def test_a_watch_goes_on_when_ray_answers_again(table: Table) -> None:
    table.broken = {"one"}
    table.add("one")
    table.states["one"] = "CREATED"
    assert table.failed.wait(60)
    table.broken = set()
    assert table.has_told("one ready")


def test_a_group_of_which_nothing_can_be_known_holds_up_no_other(table: Table) -> None:
    table.broken = {"unknown"}
    table.add("unknown")
    table.add("other")
    table.states["other"] = "CREATED"
    assert table.has_told("other ready")
    table.states["other"] = "REMOVED"
    assert table.has_told("other ready", "other lost")


def test_a_watch_that_is_closed_while_something_is_to_come_ends(table: Table) -> None:
    table.add("one")
    assert len(watches()) == 1
    table.watch.close()
    assert not watches()


def test_a_watch_that_outlives_its_end_asks_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may be gone by then, and whoever asks for its table starts another."""
    monkeypatch.setattr(keepers, "_END_S", 0.0)
    asked: list[str] = []
    is_asked, answers = threading.Event(), threading.Event()

    def slow(group: Any) -> str:
        asked.append(group.name)
        is_asked.set()
        answers.wait(60)
        return "CREATED"

    def all_of_them() -> set[str]:
        asked.append("all")
        return set()

    watch = GroupWatch(state_of=slow, created=all_of_them, check_s=0.0)
    group: Any = Group("one")
    watch.add(group, on_ready=lambda: None, on_lost=lambda: None)
    assert is_asked.wait(60)
    watch.close()
    assert watches(), "it waits for Ray"
    answers.set()
    assert eventually(lambda: not watches())
    assert asked == ["one"]


def test_without_ray_its_table_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(keepers, "placement_group_table", lambda *_: pytest.fail("it starts Ray"))
    group: Any = Group("one")
    with pytest.raises(ConnectionError):
        keepers.state_of(group)
    with pytest.raises(ConnectionError):
        keepers.created()


SLOTS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster(()) as small:
        add_node(small)
        yield small


def add_node(cluster: SmallCluster) -> str:
    node = cluster.cluster.add_node(num_cpus=SLOTS, num_gpus=0, **LIGHT)
    name = f"n{node.node_id[:10]}"
    cluster.raylets[name] = node
    return name


def slowly(_: str) -> dict[str, Value]:
    return {"step_s": 0.02}


def lease_actors() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in named if " lease " in one["name"]]


def test_more_jobs_than_slots_take_turns_in_leases_without_actors(
    tmp_path: Path, cluster: SmallCluster
) -> None:
    (node,) = cluster.raylets
    bench = RayBench(tmp_path, slots=SLOTS)
    jobs = [f"job-{number}" for number in range(2 * SLOTS + 1)]
    for job in jobs:
        bench.start(job, on_nodes({node: 1}))
    done: set[str] = set()
    while done != set(jobs):
        event = bench.wait_for(lambda event: isinstance(event, JobFinished))
        done.add(event.subject)
        assert len([one for one in groups() if "CREATED" in one]) <= SLOTS
        assert not lease_actors()
    bench.substrate.close()
    assert list(leaks(tmp_path)) == []
    assert not watches()


def test_a_lease_that_somebody_removes_is_missed_and_the_job_goes_on(
    tmp_path: Path, cluster: SmallCluster
) -> None:
    (node,) = cluster.raylets
    bench = RayBench(tmp_path, epochs=200, slots=SLOTS, config=slowly)
    bench.start("a", on_nodes({node: 1}))
    bench.wait_for_kind(JobReported, "a")
    (name,) = [one["name"] for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    ray.util.remove_placement_group(ray.util.get_placement_group(name))
    retried = bench.wait_for_kind(JobRetried, "a")
    assert isinstance(retried, JobRetried)
    assert "Ray took its place away" in retried.error
    bench.wait_for_kind(JobReported, "a")
    bench.substrate.close()
    assert list(leaks(tmp_path)) == []


def test_a_job_that_waits_for_a_slot_that_another_program_has_leaves_nothing(
    tmp_path: Path, cluster: SmallCluster
) -> None:
    (node,) = cluster.raylets
    others = ray.util.placement_group([{"CPU": float(SLOTS)}], name="others")
    assert others.wait(30)
    bench = RayBench(tmp_path, slots=SLOTS)
    bench.start("a", on_nodes({node: 1}))
    assert eventually(lambda: len(groups()) == 2)
    bench.tell(Action.PARK, "a", on_nodes({}))
    assert eventually(lambda: len(groups()) == 1)
    bench.tell(Action.START, "a", on_nodes({node: 1}))
    assert eventually(lambda: len(groups()) == 2)
    bench.substrate.close()
    ray.util.remove_placement_group(others)
    assert list(leaks(tmp_path)) == []
    assert not watches()


def test_a_node_that_dies_takes_its_leases_with_it(tmp_path: Path, cluster: SmallCluster) -> None:
    (stays,) = cluster.raylets
    dies = add_node(cluster)
    bench = RayBench(tmp_path, epochs=20, slots=2 * SLOTS, config=slowly)
    bench.start("a", on_nodes({stays: 1, dies: 1}))
    bench.wait_for_kind(JobReported, "a")
    cluster.kill(dies)
    bench.wait_for_kind(NodeLost, dies)
    bench.tell(Action.START, "a", on_nodes({stays: 1}))
    bench.wait_for_kind(JobFinished, "a")
    assert not [event for event in bench.events if isinstance(event, JobRetried)], "no job was to blame"
    bench.substrate.close()
    assert list(leaks(tmp_path)) == []
