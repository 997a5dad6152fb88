"""A run that stops while nodes are on the way: what becomes of them, without a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("ray")

from launch_bench import TWO, alive, changing, unseen, wish
from live_processes import eventually
from stretto.core.cluster import Node
from stretto.core.events import Decided, Event, NodeLaunched, NodeReleased, RunPaused
from stretto.core.resources import Resources
from stretto.journal.folds.nodes import NodeRecord
from stretto.substrate.fleet.commands import Commands
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.launch import AutoscalerLauncher
from stretto.substrate.ray.launch_commands import CommandLauncher
from stretto.substrate.ray.nodes import RayNode

FOREVER = "sleep 3600"
LONG_S = 3600.0


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """Where commands write what they do."""
    return tmp_path / "said"


def launcher(folder: Path, launch: str = FOREVER, release: str = "") -> CommandLauncher:
    commands = Commands(launch=launch, release=release)
    return CommandLauncher(commands, [TWO], address="head:1", folder=folder / "nodes", grace_s=5.0)


def release_to(said: Path) -> str:
    return f"sh -c 'echo release {{name}} {{number}} {{ray_id}}. >> {said}'"


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "nodes").iterdir())


def under_way(made: CommandLauncher, there: list[RayNode], *, late_s: float) -> RayFleet:
    """A node was asked for, and is not there yet."""
    fleet = changing(made, there, late_s=late_s)
    fleet.provision(wish(1), 0.0)
    return fleet


def paused() -> Sequence[Event]:
    """The record of a run that was paused while a node was on the way."""
    return [
        Decided(t_s=0.0, policy="t", instructions=(), reasons={}, memory=None, wish=wish(1)),
        NodeLaunched(t_s=1.0, node=Node("two-1", Resources(gpu=2), "two")),
        RunPaused(t_s=5.0),
    ]


class TestStopping:
    def test_a_launch_is_ended_before_the_node_is_released(self, tmp_path: Path, said: Path) -> None:
        """Else what it is still bringing up would come afterwards."""
        begun = tmp_path / "begun"
        launch = f"sh -c 'trap \"echo ended >> {said}; exit 0\" TERM; touch {begun}; {FOREVER} & wait'"
        fleet = under_way(launcher(tmp_path, launch, release_to(said)), [], late_s=0.0)
        assert eventually(begun.exists)
        fleet.close()
        assert said.read_text().splitlines() == ["ended", "release two-1 1 ."]

    def test_a_node_that_comes_all_the_same_is_released_as_soon_as_it_is_there(
        self, tmp_path: Path, said: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        there: list[RayNode] = []
        fleet = under_way(launcher(tmp_path, "true", release_to(said)), there, late_s=LONG_S)
        there.append(alive("two-1", "two"))
        fleet.close()
        assert said.read_text().splitlines() == ["release two-1 1 .", "release two-1 1 id-two-1."]
        assert kept(tmp_path) == []
        (message,) = caplog.messages
        assert message == (
            "Cancelled on the way: two-1. Waiting up to 3600 s to release those that still come; "
            "Ctrl-C skips it."
        )

    def test_one_that_does_not_come_in_time_is_told_of_with_the_command_that_ends_it(
        self, tmp_path: Path, said: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        under_way(launcher(tmp_path, FOREVER, release_to(said)), [], late_s=0.0).close()
        assert kept(tmp_path) == ["two-1.json"], "what a later start ends"
        before, _, command = caplog.messages[-1].partition("; to do so now: ")
        assert before.startswith("Node two-1 was released before it came; it may still come, and cost money")
        assert shlex.split(command) == ["sh", "-c", f"echo release two-1 1 . >> {said}"]

    def test_ctrl_c_cuts_the_wait_short_and_the_node_is_still_on_record(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt(seconds)

        fleet = under_way(launcher(tmp_path, FOREVER, "true"), [], late_s=LONG_S)
        made = fleet._launcher
        assert made is not None
        made.release("two-1", "")
        made.settle()
        monkeypatch.setattr("stretto.substrate.ray.fleet.time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fleet.close()
        assert kept(tmp_path) == ["two-1.json"]
        assert caplog.messages[-1].endswith("to do so now: true")

    def test_where_ending_the_launch_ends_the_node_nobody_waits(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        under_way(launcher(tmp_path), [], late_s=LONG_S).close()
        assert kept(tmp_path) == []
        assert caplog.messages == []

    @pytest.mark.parametrize("heard", [True, False])
    def test_a_launch_that_failed_is_not_waited_for(
        self, tmp_path: Path, said: Path, caplog: pytest.LogCaptureFixture, heard: bool
    ) -> None:
        made = launcher(tmp_path, "false", release_to(said))
        fleet = under_way(made, [], late_s=LONG_S)
        assert eventually(lambda: "two-1" in made._failed)
        assert not heard or eventually(lambda: not fleet.look(1.0) and not fleet._asked_s)
        fleet.close()
        assert kept(tmp_path) == ["two-1.log"]
        assert caplog.messages == []


class TestGoingOn:
    def test_what_was_called_off_is_released_again_and_another_is_launched(
        self, tmp_path: Path, said: Path
    ) -> None:
        under_way(launcher(tmp_path, "true", release_to(said)), [], late_s=0.0).close()
        fleet = unseen(launcher(tmp_path, "true", release_to(said)))
        told = fleet.recall(paused(), 20.0)
        assert told[0] == NodeReleased(t_s=20.0, node_id="two-1"), "until the pause it has cost"
        assert [event.node.id for event in told if isinstance(event, NodeLaunched)] == ["two-3"]
        assert eventually(lambda: said.read_text().splitlines() == ["release two-1 1 ."] * 2)
        fleet.close()
        assert kept(tmp_path) == ["two-3.json"]

    def test_if_it_came_meanwhile_it_is_released_by_its_id(self, tmp_path: Path, said: Path) -> None:
        under_way(launcher(tmp_path, "true", release_to(said)), [], late_s=0.0).close()
        said.unlink()
        fleet = unseen(launcher(tmp_path, "true", release_to(said)), alive("two-1", "two"))
        fleet.recall(paused(), 20.0)
        assert eventually(lambda: said.exists() and said.read_text() == "release two-1 1 id-two-1.\n")
        assert fleet.where("two-1") is None
        fleet.close()

    def test_a_run_that_is_over_by_then_lets_go_of_it(self, tmp_path: Path, said: Path) -> None:
        under_way(launcher(tmp_path, "true", release_to(said)), [], late_s=0.0).close()
        said.unlink()
        fleet = unseen(launcher(tmp_path, "true", release_to(said)), alive("two-1", "two"))
        fleet.release_all(paused(), 20.0)
        fleet.close()
        assert said.read_text() == "release two-1 1 id-two-1.\n"
        assert kept(tmp_path) == []

    def test_the_record_knows_what_a_pause_called_off_until_its_end_was_told(self) -> None:
        record = NodeRecord.of(paused())
        assert (record.called_off, record.coming, record.rented) == (["two-1"], {}, ())
        assert record.wish == wish(1)
        over = NodeRecord.of([*paused(), NodeReleased(t_s=20.0, node_id="two-1")])
        assert over.called_off == []


class TestAutoscaler:
    def test_if_it_cannot_be_told_that_nothing_is_wanted_the_words_to_tell_it_are_given(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        lines = ["down"]

        def request(bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> None:
            if lines and not (bundles or selectors):
                raise ConnectionError(lines[0])

        made = AutoscalerLauncher([TWO], "GPU", request=request)
        fleet = unseen(made)
        fleet.provision(wish(1), 0.0)
        assert eventually(lambda: bool(fleet.look(1.0)))
        fleet.close()
        (message,) = caplog.messages
        assert "the request for none failed (down)" in message
        argv = shlex.split(message.partition("on a machine of the cluster: ")[2])
        assert argv[:2] == ["python", "-c"]
        compile(argv[2], "command", "exec")

    def test_if_it_can_nothing_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        fleet = unseen(AutoscalerLauncher([TWO], "GPU", request=lambda *_: None))
        fleet.provision(wish(1), 0.0)
        fleet.close()
        assert caplog.messages == []
