"""Nodes of a run whose deadline passed while it was dead: they are let go of before its result is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from launching import finished
from live_processes import running_with
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError, JournalError
from stretto.core.events import Decided, Event, NodeAdded, NodeLaunched, RunPaused, RunStarted
from stretto.core.resources import Resources
from stretto.driving.ray_target import RayCluster
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.journal.sqlite import SqliteJournal
from stretto.runs.begin import begin
from stretto.runs.folder import RunFolder, RunSpec
from stretto.substrate.fleet.commands import Commands
from stretto.substrate.fleet.nodes import NodeKind
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.launch import AutoscalerLauncher, Launcher
from stretto.substrate.ray.launch_commands import CommandLauncher
from tune_world import STUDY, write_study

MARK = f"sleep 95{os.getpid()}"
CLUSTER = """
[limits]
deadline = "1m"
[cluster]
max_nodes = 2
[[cluster.instance]]
name = "box"
gpus = 2
usd_per_hour = 3.6
[ray]
"""
BOX = NodeKind("box", 2)
AGO_S = 3600.0


def commands(folder: RunFolder) -> CommandLauncher:
    return CommandLauncher(Commands(launch=MARK), [BOX], address="head:1", folder=folder.nodes, grace_s=0.3)


class DeadRun:
    """A run that was begun an hour ago, had a minute, and was killed with one node up."""

    def __init__(self, tmp_path: Path, ray: str) -> None:
        study = write_study(tmp_path, STUDY + CLUSTER + ray)
        self.checked: CheckedStudy = check_request(
            TuneRequest(study=study, work="train.py:train", policy="rubberband", on="ray")
        )
        rented = self.checked.outline.rented
        assert rented is not None
        self.folder = self.checked.folder
        begin(
            self.folder,
            RunSpec(
                kind="tune",
                started_at_s=time.time() - AGO_S,
                asked=self.checked.asked,
                slots=4,
                offer=rented.offer,
                deadline_s=60.0,
                file=str(study),
            ),
        )
        node = Node("tiny-box-1", Resources(gpu=2), "box")
        self.write(
            RunStarted(t_s=0.0, identity={"policy": "rubberband"}, nodes=()),
            Decided(t_s=0.0, policy="t", instructions=(), reasons={}, memory=None, wish=Wish((("box", 2),))),
            NodeLaunched(t_s=1.0, node=node),
            NodeAdded(t_s=20.0, node=node, init_s=19.0),
        )

    def write(self, *events: Event) -> None:
        with closing(SqliteJournal(self.folder.journal, run=self.folder.name)) as journal:
            journal.append(events)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.folder.events()]


@pytest.fixture
def requests() -> list[tuple[list[Any], list[Any]]]:
    """What the autoscaler was asked for, in order."""
    return []


@pytest.fixture
def opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requests: list[tuple[list[Any], list[Any]]]
) -> list[Launcher]:
    """The launchers of the sites that were opened; a test puts there how the next is made."""
    monkeypatch.chdir(tmp_path)
    made: list[Launcher] = []

    def fleet(folder: RunFolder) -> RayFleet:
        launcher = (
            commands(folder) if folder.nodes.exists() else AutoscalerLauncher([BOX], "GPU", request=asked)
        )
        made.append(launcher)
        return RayFleet(launcher, resource="GPU", read=lambda _: (), connected=lambda: True)

    def asked(bundles: list[Any], selectors: list[Any]) -> None:
        requests.append((bundles, selectors))

    @contextmanager
    def open_site(self: RayCluster) -> Iterator[Any]:
        del self
        yield SimpleNamespace(fleet=fleet)

    monkeypatch.setattr(RayCluster, "opened", open_site)
    return made


def test_they_end_once_and_have_cost_until_then(tmp_path: Path, opened: list[Launcher]) -> None:
    run = DeadRun(tmp_path, f"launch = \"sh -c 'exec {MARK}' {{name}} {{instance}}\"\n")
    commands(run.folder).launch("tiny-box-1", "box")
    result = finished(run.checked)
    assert result is not None
    assert result.ended_by == "deadline"
    assert not running_with(MARK)
    assert list(run.folder.nodes.iterdir()) == []
    assert run.kinds()[-2:] == ["run-resumed", "node-released"]
    assert result.cost_usd == pytest.approx(AGO_S * 0.001, abs=0.2), "it was up all the time"
    assert result.finished_s == 60.0, "nobody drove it after its deadline"
    again = finished(run.checked)
    assert again is not None
    assert again.cost_usd == result.cost_usd
    assert len(opened) == 1, "there is nothing left to end"


def test_the_autoscaler_is_told_that_nothing_is_wanted_any_more(
    tmp_path: Path, opened: list[Launcher], requests: list[tuple[list[Any], list[Any]]]
) -> None:
    run = DeadRun(tmp_path, "autoscaler = true\n")
    assert finished(run.checked) is not None
    assert len(opened) == 1
    assert requests[-1] == ([], [])
    assert run.kinds()[-1] == "node-released"


def test_a_run_that_was_stopped_in_order_has_none(tmp_path: Path, opened: list[Launcher]) -> None:
    run = DeadRun(tmp_path, "autoscaler = true\n")
    run.write(RunPaused(t_s=30.0))
    assert finished(run.checked) is not None
    assert opened == []


def test_nodes_of_a_run_that_is_still_at_its_last_epoch_are_its_own(
    tmp_path: Path, opened: list[Launcher]
) -> None:
    run = DeadRun(tmp_path, "autoscaler = true\n")
    with (
        closing(SqliteJournal(run.folder.journal, run=run.folder.name)),
        pytest.raises(InputError, match="another process is working on this run"),
    ):
        finished(run.checked)
    assert opened == []
    assert run.kinds()[-1] == "node-added"


def test_with_a_damaged_journal_it_is_said_what_may_be_up(tmp_path: Path, opened: list[Launcher]) -> None:
    run = DeadRun(tmp_path, f"launch = \"sh -c 'exec {MARK}' {{name}} {{instance}}\"\n")
    run.folder.nodes.mkdir()
    (run.folder.nodes / "tiny-box-1.json").write_text("{}")
    run.folder.journal.write_bytes(b"no journal")
    with pytest.raises(JournalError, match=r"tiny-box-1 may still be up.*cannot be read as a journal"):
        finished(run.checked)
    assert opened == []


def test_where_the_cluster_cannot_be_reached_it_is_said_what_may_be_up(
    tmp_path: Path, opened: list[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DeadRun(tmp_path, "autoscaler = true\n")

    def nobody(self: RayCluster) -> None:
        del self
        raise InputError("nobody answers.", remedy="Start it.")

    monkeypatch.setattr(RayCluster, "opened", nobody)
    with pytest.raises(InputError, match=r"tiny-box-1 may still be up.*nobody answers\. Start it\..*report"):
        finished(run.checked)
    assert opened == []
