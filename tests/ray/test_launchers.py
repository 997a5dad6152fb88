"""Who brings up nodes, without a cluster: commands of all sorts, and the autoscaler."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("ray")

from launch_bench import TWO, alive, changing, collected, two_came, unseen, wish
from live_processes import eventually, running_with
from stretto.core.errors import InputError
from stretto.substrate.fleet.commands import Commands
from stretto.substrate.ray import launch_commands
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.launch import AutoscalerLauncher, LaunchBegan, LaunchFailed
from stretto.substrate.ray.launch_commands import CommandLauncher
from stretto.substrate.ray.nodes import RayNode


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
        assert collected(made.news, 2) == [LaunchBegan("two-1"), LaunchBegan("two-2")]
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
        assert isinstance(failed, LaunchFailed)
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

    def late(self, folder: Path, release: str) -> tuple[CommandLauncher, list[RayNode], RayFleet]:
        """A node is not there in time, is let go of, and comes all the same."""
        made, there = self.launcher(folder, "true", release), list[RayNode]()
        fleet = changing(made, there)
        fleet.provision(wish(1), 0.0)
        told = fleet.look(10.0)
        assert [event.kind for event in told][-2:] == ["node-released", "node-refused"]
        return made, there, fleet

    def test_a_node_that_comes_after_it_was_given_up_is_let_go_of_once_more(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        made, there, fleet = self.late(tmp_path, f"sh -c 'echo {{name}} {{number}} {{ray_id}}. >> {out}'")
        assert eventually(lambda: not made.news() and bool(made._given_up))
        there.append(alive("two-1", "two"))
        assert eventually(lambda: not fleet.look(20.0) and len(out.read_text().splitlines()) == 2)
        assert out.read_text().splitlines() == ["two-1 1 .", "two-1 1 id-two-1."]
        fleet.close()
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_a_node_that_comes_while_it_is_let_go_of_is_so_once_more(self, tmp_path: Path) -> None:
        out, gate = tmp_path / "out", tmp_path / "gate"
        wait = f"while ! test -e {gate}; do sleep 0.01; done"
        made, there, fleet = self.late(tmp_path, f"sh -c '{wait}; echo {{ray_id}}. >> {out}'")
        there.append(alive("two-1", "two"))
        assert eventually(lambda: not fleet.look(20.0) and bool(made._late))
        gate.touch()
        fleet.close()
        assert out.read_text().splitlines() == [".", "id-two-1."]
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_a_late_node_whose_number_is_another_nodes_is_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        out = tmp_path / "out"
        made, there, fleet = self.late(tmp_path, f"sh -c 'echo {{number}} {{ray_id}}. >> {out}'")
        assert eventually(lambda: not made.news() and bool(made._given_up))
        fleet.provision(wish(1), 11.0)
        there.append(alive("two-1", "two"))
        assert eventually(lambda: not fleet.look(12.0) and "two-1" in caplog.text)
        assert "another node has its number 1 now" in caplog.text
        fleet.close()
        assert out.read_text().splitlines() == ["1 .", "1 ."], "each was ended while it was on the way"
        assert [path.name for path in (tmp_path / "nodes").iterdir()] == ["two-2.json"], "that may come too"

    def replaced(self, folder: Path, release: str) -> tuple[CommandLauncher, list[RayNode], RayFleet]:
        """After a node was given up the controller is killed, and another one goes on."""
        killed, _, looks_on = self.late(folder, release)
        looks_on._over.set()
        assert eventually(lambda: not killed.news() and bool(killed._given_up))
        assert [path.name for path in (folder / "nodes").iterdir()] == ["two-1.late"]
        made, there = self.launcher(folder, "true", release), list[RayNode]()
        fleet = changing(made, there)
        assert fleet.recall([], 20.0) == []
        return made, there, fleet

    def test_a_late_node_is_let_go_of_also_by_a_later_controller(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        out = tmp_path / "out"
        _, there, fleet = self.replaced(tmp_path, f"sh -c 'echo {{name}} {{number}} {{ray_id}}. >> {out}'")
        there.append(alive("two-1", "two"))
        assert eventually(lambda: not fleet.look(21.0) and len(out.read_text().splitlines()) == 2)
        assert out.read_text().splitlines() == ["two-1 1 .", "two-1 1 id-two-1."]
        assert eventually(lambda: list((tmp_path / "nodes").iterdir()) == [])
        fleet.close()
        assert caplog.text == ""

    def test_a_later_controller_too_spares_the_node_that_has_the_number_now(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        out = tmp_path / "out"
        made, there, fleet = self.replaced(tmp_path, f"sh -c 'echo {{number}} {{ray_id}}. >> {out}'")
        made.launch("two-7", "two")
        there.append(alive("two-1", "two"))
        assert eventually(lambda: not fleet.look(21.0) and "two-1" in caplog.text)
        assert "another node has its number 1 now" in caplog.text
        assert "there is no record" not in caplog.text
        assert out.read_text().splitlines() == ["1 ."]
        made.release("two-7", "")
        fleet.close()
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_a_run_that_is_let_go_of_ends_a_late_node_and_forgets_one_that_never_came(
        self, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        release = f"sh -c 'echo {{name}} {{ray_id}}. >> {out}'"
        killed = self.launcher(tmp_path, "true", release)
        for name in ("two-1", "two-2"):
            killed.launch(name, "two")
            killed.release(name, "")
        assert eventually(lambda: not killed.news() and len(killed._given_up) == 2)
        unseen(self.launcher(tmp_path, "true", release)).close()
        assert len(list((tmp_path / "nodes").glob("*.late"))) == 2, "that one had nothing to say"
        fleet = unseen(self.launcher(tmp_path, "true", release), alive("two-2", "two"))
        assert fleet.release_all([], 20.0) == []
        fleet.close()
        assert sorted(out.read_text().splitlines()) == ["two-1 .", "two-2 .", "two-2 id-two-2."]
        assert list((tmp_path / "nodes").iterdir()) == []

    def test_what_a_command_said_is_cut_at_a_word(self, tmp_path: Path) -> None:
        made = self.launcher(tmp_path, f"sh -c 'echo {'quota ' * 200}; false'")
        made.launch("two-1", "two")
        _, failed = collected(made.news, 2)
        assert isinstance(failed, LaunchFailed)
        said = failed.why.partition(": ")[2].split()
        assert (said[0], {*said[1:]}) == ("…", {"quota"})
        made.release("two-1", "")
        made.close()

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
        assert collected(made.news, 2) == [LaunchBegan("two-1"), LaunchBegan("two-2")]
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
        assert isinstance(failed, LaunchFailed)
        assert "could not be asked: no line" in failed.why
        made.close()
