"""Studies and jobs on a real Ray cluster of two unequal nodes, through `tune`, `run` and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import ray

from launching import prepare, start, start_run
from live_processes import STRETTO, eventually
from local_bench import STUB
from ray_bench import SmallCluster, small_cluster
from stretto import tune
from stretto.core.errors import InputError
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobReported,
    NodeAdded,
    NodeLost,
    RunStarted,
)
from stretto.driving.drive import NoObserver
from stretto.driving.ray_open import OpenRay, node_prefix
from stretto.driving.ray_target import RayCluster
from stretto.driving.request import TuneRequest, check_request
from stretto.driving.stop import Stop
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import OpenTarget, TargetRequest, node_of
from stretto.inputs.cluster import MachineSpec, RayNodes
from stretto.inputs.jobs import JobSpec
from stretto.inputs.study import Rented
from stretto.inputs.work import Entry
from stretto.launch.describe import Tell
from stretto.launch.jobs import RunRequest, check_run, earlier_run_result
from stretto.planning.profile import Spread
from stretto.pricing.instances import Instance, Offer
from stretto.runs.folder import RunFolder
from stretto.substrate.ray.nodes import read_nodes
from stretto.substrate.ray.substrate import RaySubstrate
from stretto.wire.messages import Described
from tune_world import KNOWN, TRAIN


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster((2, 1)) as small:
        yield small


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: SmallCluster) -> Path:
    del cluster
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "study.toml").write_text(KNOWN)
    return tmp_path


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that sleep instead of training, and start at once."""
    monkeypatch.setattr("stretto.driving.ray_open.RaySubstrate", partial(RaySubstrate, trainer=STUB))


class Ten(NoObserver):
    """Ten reports are enough."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._left = 10

    def observe(self, event: Event) -> None:
        self._left -= isinstance(event, JobReported)
        if self._left == 0:
            self._stop.ask()


def described(jobs: Sequence[JobSpec], target: OpenTarget, log: Path, *, tell: Tell) -> dict[str, Described]:
    """What the stub would say of itself."""
    del target, log, tell
    some = Described(
        examples=80,
        batch=16,
        adaptive=True,
        max_batch=64,
        per_worker_min=1,
        per_worker_max=64,
        accumulation=True,
    )
    return {job.name: some for job in jobs}


def events_of(name: str) -> list[Event]:
    return list(RunFolder(Path("runs") / name).events())


def nodes_used(events: list[Event]) -> set[str]:
    told = [one for event in events if isinstance(event, Decided) for one in event.instructions]
    return {node for instruction in told for node in instruction.allocation.nodes}


@pytest.mark.usefixtures("here")
def test_a_study_is_measured_and_tuned_on_all_nodes(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.profiling.probe_data.PROBE_S", 8.0)
    Path("study.toml").write_text(KNOWN[: KNOWN.index("[profile]")])
    result = tune("study.toml", "train.py:train", deadline=600.0, on="ray", store="store")
    assert result.succeeded
    assert result.predicted_finish_s is not None
    events = events_of("tiny")
    first = events[0]
    assert isinstance(first, RunStarted)
    assert {node.id: node.gpus for node in first.nodes} == dict(zip(cluster.raylets, (2, 1), strict=True))
    assert nodes_used(events) == set(cluster.raylets)
    assert result.cost_usd == pytest.approx(0.003 * result.finished_s, abs=0.004)
    assert Path(str(result.checkpoint)).is_relative_to(Path("store/tiny").absolute())
    assert Path(str(result.checkpoint)).is_file()
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"], "the probe left nothing"
    assert [path.name for path in Path("store").iterdir()] == ["tiny"], "nor there"
    mine = Path("runs/tiny/id").read_text()[:8]
    assert list(Path("/tmp").glob(f"stretto-tiny-{mine}-*")) == [], "nor on the nodes"  # noqa: S108
    profile = json.loads(Path("runs/tiny/profile.json").read_text())
    assert (profile["slots"], profile["what"].endswith("on Ray")) == (3, True)


@pytest.mark.usefixtures("here", "stub")
def test_jobs_share_nodes_of_different_sizes(cluster: SmallCluster) -> None:
    Path("jobs.toml").write_text(
        "".join(
            f'[[job]]\nname = "{name}"\nentry = "train.py:train"\nepochs = 4\nconfig = {{ lr = 0.1 }}\n'
            f"gpus = {{ min = {workers}, max = {workers} }}\n"
            for name, workers in (("alone", 1), ("pair", 2))
        )
    )
    checked = check_run(RunRequest(jobs=Path("jobs.toml"), on="ray"))
    result = start_run(checked, describe=described)
    assert result.succeeded
    assert earlier_run_result(checked) == result
    assert nodes_used(events_of("jobs")) == set(cluster.raylets), "neither would have been enough"


@pytest.mark.usefixtures("here", "stub")
def test_a_policy_that_rents_takes_nodes_that_are_there_and_finds_them_again() -> None:
    stop = Stop()
    request = TuneRequest(
        study=Path("study.toml"), work="train.py:train", policy="rubberband", on="ray", deadline_s=600.0
    )
    part = start(prepare(check_request(request)), stop=stop, observer=Ten(stop))
    assert part.ended_by == "request"
    result = start(prepare(check_request(request)))
    assert result.ended_by == "jobs"
    assert result.cost_usd > 0
    events = events_of("tiny")
    assert [node for event in events if isinstance(event, RunStarted) for node in event.nodes] == []
    added = [event.node for event in events if isinstance(event, NodeAdded)]
    assert [(node.instance, node.gpus) for node in added] == [("slots-2", 2)]


def begin(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STRETTO, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ.copy(),
    )


def wait_for(name: str, enough: Callable[[list[Event]], bool], command: subprocess.Popen[str]) -> None:
    while command.poll() is None:
        if enough(events_of(name)):
            return
        time.sleep(0.05)
    pytest.fail(f"the run ended before: {command.communicate()}")


@pytest.mark.usefixtures("here")
def test_ctrl_c_saves_and_another_node_goes_on(cluster: SmallCluster) -> None:
    words = ("tune", "study.toml", "train.py:train", "--policy", "asha", "--yes", "--json", "--name")
    address = str(cluster.cluster.address)
    Path("slow").touch()
    with begin(*words, "stopped", "--on", f"ray:{address}") as command:
        wait_for("stopped", lambda events: any(isinstance(one, JobReported) for one in events), command)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=300)
    assert command.returncode == 1
    assert json.loads(out)["ended_by"] == "request"
    assert "stopped, with checkpoints saved; resume with: stretto tune" in err
    assert any(isinstance(event, CheckpointSaved) for event in events_of("stopped"))
    Path("slow").unlink()
    mine = f"n{ray.get_runtime_context().get_node_id()[:10]}"
    gone = next(name for name in cluster.raylets if name != mine)  # this process would not survive its own
    cluster.kill(gone)
    new = cluster.add(2)
    assert eventually(lambda: gone not in {node.name for node in read_nodes()})
    with pytest.raises(InputError, match='on was "ray" and is "local"'):
        tune("study.toml", "train.py:train", policy="asha", name="stopped")
    result = tune("study.toml", "train.py:train", policy="asha", name="stopped", on="ray")
    assert result.ended_by == "jobs"
    events = events_of("stopped")
    assert gone in [event.node_id for event in events if isinstance(event, NodeLost)]
    assert new in [event.node.id for event in events if isinstance(event, NodeAdded)]


class TestRefused:
    def test_an_address_where_nobody_answers(self, here: Path) -> None:
        with pytest.raises(InputError, match=r"nothing answers at 127\.0\.0\.1:1"):
            tune(here / "study.toml", "train.py:train", on="ray:127.0.0.1:1")

    def test_what_is_no_address(self, here: Path) -> None:
        with pytest.raises(InputError, match="no address"):
            tune(here / "study.toml", "train.py:train", on="ray:here")

    def test_slots_of_nodes_that_have_their_own(self, here: Path) -> None:
        with pytest.raises(InputError, match="have the slots that Ray knows of"):
            tune(here / "study.toml", "train.py:train", on="ray", slots=2)


def test_what_a_renting_policy_cannot_use_is_told(cluster: SmallCluster, tmp_path: Path) -> None:
    del cluster
    request = TargetRequest(on="ray", runs=tmp_path, machine=MachineSpec(slots=7), rents=True)
    with RayCluster(request, None).opened() as target:
        told = "\n".join(target.notes)
    assert "[machine] slots applies to --on local; the run has 3 slots" in told
    assert "1 of 2 slots are used, and 1 of another size are not" in told


def test_nodes_that_are_there_already_are_told_where_others_can_be_launched(tmp_path: Path) -> None:
    offer = Offer(instances=(Instance(name="two", gpus=2, usd_per_hour=1.0),), max_nodes=4)
    rented = Rented(offer=offer, nodes=RayNodes(launch="up"), queue_s=Spread(0.0), init_s=Spread(0.0))
    request = TargetRequest(on="ray", runs=tmp_path, machine=MachineSpec(), rents=True, rented=rented)
    nodes = (node_of("a", 2), node_of("b", 2), node_of("c", 2), node_of("odd", 1))
    target = OpenRay(
        request=request, address="h:1", own=False, resource="GPU", nodes=nodes, launched=frozenset({"c"})
    )
    assert [node.id for node in target.to_measure_on] == ["a", "b", "odd"], "c is some run's"
    (note,) = target.notes
    assert note.startswith("There already: 2 nodes with 4 slots, used before others are launched.")
    assert note.endswith("Those of another size than [cluster] has are not used.")
    (note,) = replace(target, nodes=nodes[2:]).notes
    assert note == "The nodes that are there are of another size than [cluster] has, and are not used."


@pytest.mark.usefixtures("here", "stub")
def test_nodes_that_come_or_go_while_a_run_is_prepared_are_told(cluster: SmallCluster) -> None:
    gone = cluster.add(1)
    request = TargetRequest(on="ray", runs=Path("runs"), machine=MachineSpec())
    with RayCluster(request, None).opened() as target:
        assert gone in [node.id for node in target.held]
        cluster.kill(gone)
        new = cluster.add(1)
        training = TrainingSpec(work=lambda _: Entry(Path("train.py"), "train"), slots=4, nodes=target.held)
        folder = RunFolder(Path("runs/late"))
        folder.path.mkdir(parents=True)
        substrate = target.make(training, folder, time.monotonic)
        told = [substrate.next_event(substrate.now_s() + 180.0) for _ in range(2)]
        substrate.close()
    cluster.kill(new)
    assert {(type(event), event and event.subject) for event in told} == {(NodeLost, gone), (NodeAdded, new)}


def test_names_of_nodes_are_labels() -> None:
    assert node_prefix("ünsre Läufe/3") == "nsre-L-ufe-3-"
