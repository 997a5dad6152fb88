"""Commands on a real Ray cluster of two nodes: resized, failing, tuned, and gone when their controller is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

from live_processes import eventually, running_with
from process_bench import BATCH, trial_of
from ray_bench import SmallCluster, small_cluster
from stretto import run, tune
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.errors import InputError
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobReported, NodeLost
from stretto.core.instructions import Action, Instruction
from stretto.runs.folder import RunFolder
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import NO_ENTRY, Trainer
from stretto.substrate.ray.agent import Agent, AgentConfig
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.substrate import RaySubstrate
from tune_world import KNOWN

SCRIPT = """
import json, os, signal, sys, time
name, last = os.environ["STRETTO_JOB"], int(sys.argv[1])
path = f"saved-{name}"
first = os.environ["RANK"] == "0"
epoch = int(open(path).read()) if os.path.exists(path) else 0
parts = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "STRETTO_NODES", "CUDA_VISIBLE_DEVICES")
os.write(2, ("told " + " ".join(os.environ[part] for part in parts) + "\\n").encode())
def leave(*_):
    if first:
        open(path + ".new", "w").write(str(epoch))
        os.replace(path + ".new", path)
    sys.exit()
signal.signal(signal.SIGTERM, leave)
if os.path.exists(f"fail-{name}"):
    raise RuntimeError("as I was told")
while epoch < last:
    time.sleep(0.05)
    if epoch >= 20 and os.path.exists(f"hold-{name}"):
        continue
    epoch += 1
    if first:
        print(json.dumps({"epoch": epoch, "accuracy": 1 - 1 / epoch}), flush=True)
"""
COMMAND = (sys.executable, "train.py", "8")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster((2, 1)) as small:
        yield small


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: SmallCluster) -> Path:
    del cluster
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "study.toml").write_text(KNOWN)
    return tmp_path


def events_of(name: str) -> list[Event]:
    return list(RunFolder(Path("runs") / name).events())


def nodes_used(events: list[Event]) -> set[str]:
    told = [one for event in events if isinstance(event, Decided) for one in event.instructions]
    return {node for instruction in told for node in instruction.allocation.nodes}


def epochs_of(events: list[Event], job_id: str) -> list[int]:
    reports = [event for event in events if isinstance(event, JobReported) and event.job_id == job_id]
    return [result.epoch for report in reports for result in report.results]


class Bench:
    """One trial `a` of 60 epochs."""

    def __init__(self, folder: Path) -> None:
        began_s = time.monotonic()
        command = Command((sys.executable, str(folder / "train.py"), "60"), metric="accuracy")
        self.substrate = RaySubstrate(
            fleet=RayFleet(look_s=0.1),
            slots=3,
            spec_of=lambda job: TrainingJob(
                entry=NO_ENTRY, config={}, epochs=job.work.epochs, metric="accuracy", command=command
            ),
            run_dir=folder / "run",
            clock=lambda: time.monotonic() - began_s,
            rules=Rules(retries=1, command_s=30.0),
            runs_commands=True,
        )
        self.log = folder / "run/jobs/a/stdout.log"
        self.events: list[Event] = []
        self._number = 0
        self.substrate.admit(trial_of("a", epochs=60))

    def tell(self, action: Action, allocation: Allocation) -> None:
        self._number += 1
        self.substrate.apply([Instruction(self._number, action, "a", allocation, BATCH)])

    def wait_for(self, kind: type[Event], epoch: int = 0) -> Event:
        until_s = self.substrate.now_s() + 180.0
        while (event := self.substrate.next_event(until_s)) is not None:
            self.events.append(event)
            if isinstance(event, kind) and getattr(event, "epoch", 0) >= epoch:
                return event
        raise AssertionError(f"no {kind.__name__} among {self.events}")

    def told(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("told")]


def test_a_command_grows_over_nodes_and_outlives_one(here: Path, cluster: SmallCluster) -> None:
    hold = here / "hold-a"
    hold.touch()
    bench = Bench(here)
    big, small = cluster.raylets
    mine = f"n{ray.get_runtime_context().get_node_id()[:10]}"
    dies, stays, slots = (big, small, 2) if mine == small else (small, big, 1)
    bench.tell(Action.START, on_nodes({small: 1}))
    bench.wait_for(JobReported, 3)
    bench.tell(Action.RESIZE, on_nodes({small: 1, big: 2}))
    assert eventually(lambda: len(bench.told()) == 4)
    assert bench.told()[:1] == ["told 0 0 1 1 1 0"]
    assert sorted(bench.told()[1:]) == ["told 0 0 3 1 2 0", "told 1 0 3 2 2 0,1", "told 2 1 3 2 2 0,1"]
    cluster.kill(dies)  # this process would not survive the node it is connected to
    bench.wait_for(NodeLost)
    hold.unlink()
    bench.tell(Action.START, on_nodes({stays: 1}))
    bench.wait_for(JobFinished)
    cluster.add(slots)
    bench.substrate.close()
    assert epochs_of(bench.events, "a") == list(range(1, 61))
    assert eventually(lambda: running_with(str(here)) == []), running_with(str(here))


def test_a_crash_is_told_with_what_the_command_said(here: Path, cluster: SmallCluster) -> None:
    (here / "fail-a").touch()
    bench = Bench(here)
    bench.tell(Action.START, on_nodes(dict.fromkeys(cluster.raylets, 1)))
    failed = bench.wait_for(JobFailed)
    bench.substrate.close()
    assert isinstance(failed, JobFailed)
    assert failed.error.startswith("exit code 1 of rank ")
    assert failed.log == str(bench.log)
    assert "RuntimeError: as I was told" in failed.error
    assert [event.kind for event in bench.events if not isinstance(event, JobReported)] == [
        "job-retried",
        "job-failed",
    ]
    assert eventually(lambda: running_with(str(here)) == []), running_with(str(here))


def test_a_study_is_measured_and_tuned_with_a_command(
    here: Path, cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.profiling.probe_data.PROBE_S", 3.0)
    Path("study.toml").write_text(KNOWN[: KNOWN.index("[profile]")])
    result = tune("study.toml", COMMAND, policy="asha", deadline=600.0, on="ray")
    assert result.succeeded
    assert nodes_used(events_of("tiny")) == set(cluster.raylets)
    lines = Path("runs/tiny/jobs/trial-000/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"epoch": 1, "accuracy": 0.0}
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"], "the probe left nothing"
    assert eventually(lambda: running_with(str(here)) == []), running_with(str(here))


@pytest.mark.usefixtures("here")
def test_jobs_that_are_commands_share_the_nodes(cluster: SmallCluster) -> None:
    Path("jobs.toml").write_text(
        "".join(
            f'[[job]]\nname = "{name}"\ncommand = {json.dumps(COMMAND)}\nepochs = 8\n'
            f"gpus = {{ min = {workers}, max = {workers} }}\n"
            for name, workers in (("alone", 1), ("pair", 2))
        )
    )
    assert run("jobs.toml", on="ray").succeeded
    assert nodes_used(events_of("jobs")) == set(cluster.raylets)


def test_nothing_outlives_a_killed_controller_and_the_same_command_goes_on(
    here: Path, cluster: SmallCluster
) -> None:
    words = ("tune", "study.toml", "--policy", "asha", "--checkpoints", "--name", "killed", "--yes")
    where = ("--on", f"ray:{cluster.cluster.address}", "--", sys.executable, str(here / "train.py"), "8")
    with subprocess.Popen(
        [sys.executable, "-c", "from stretto.cli.start import main; main()", *words, *where],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ.copy(),
    ) as command:
        assert eventually(
            lambda: any(isinstance(event, JobReported) for event in events_of("killed")), within_s=180.0
        )
        command.send_signal(signal.SIGKILL)
    assert eventually(lambda: running_with(str(here)) == [], within_s=120.0), running_with(str(here))
    work = (sys.executable, str(here / "train.py"), "8")
    result = tune("study.toml", work, policy="asha", name="killed", checkpoints=True, on="ray")
    assert result.ended_by == "jobs"
    for trial in {event.job_id for event in events_of("killed") if isinstance(event, JobReported)}:
        epochs = epochs_of(events_of("killed"), trial)
        assert epochs == list(range(1, len(epochs) + 1))


def test_a_store_is_refused(here: Path) -> None:
    with pytest.raises(InputError, match="--store is for training functions; a command keeps its own"):
        tune(here / "study.toml", COMMAND, on="ray", store="store")


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    def config(cwd: Path, folder: Path) -> AgentConfig:
        return AgentConfig(
            run="r",
            scratch=tmp_path / "scratch",
            folder=folder,
            proof="proof",
            host="10.0.0.7",
            trainer=Trainer(),
            grace_s=1.0,
            command_grace_s=1.0,
            slots=1,
            cwd=cwd,
            env={},
            runs_commands=True,
        )

    (tmp_path / "id").write_text("proof")
    gone = tmp_path / "gone"
    with pytest.raises(InputError, match=f"node 10.0.0.7 does not see the command.s folder {gone}"):
        Agent(config(gone, tmp_path)).begin()
    with pytest.raises(InputError, match="does not see the run's folder") as refused:
        Agent(config(tmp_path, gone)).begin()
    assert "--store" not in str(refused.value)
