"""Files of jobs, and what the training code adds to them; real jobs that share a machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import start_run
from process_bench import CommandWorkers
from stretto.cli.explain import story_text
from stretto.core.cluster import Wish
from stretto.core.errors import InputError
from stretto.core.events import NodeAdded, NodeReleased
from stretto.core.job import Tier
from stretto.driving.drive import RealSubstrate
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import OpenTarget
from stretto.inputs.jobs import BatchSpec, JobSpec, complete, read_jobs
from stretto.inputs.work import CommandLine, Entry, find_entry
from stretto.launch.describe import Tell
from stretto.launch.jobs import INTERVAL_S, CheckedJobs, RunRequest, check_run, earlier_run_result
from stretto.report.run_text import jobs_text
from stretto.runs.begin import begin, check_same, differences
from stretto.runs.explain import explain
from stretto.runs.folder import RunFolder, RunSpec, find_run, run_folder
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.local.slots import Slots
from stretto.wire.messages import Described
from tune_world import SCRIPT, STUDY, TRAIN

DESCRIBED = Described(
    examples=1000,
    batch=100,
    adaptive=True,
    max_batch=800,
    per_worker_min=10,
    per_worker_max=200,
    accumulation=True,
)
SPEC = JobSpec(
    name="a",
    work=Entry(Path("/train.py"), "train"),
    epochs=3,
    min_workers=1,
    max_workers=None,
    batch=BatchSpec(),
    tier=None,
    submit_s=0.0,
    config=(),
)


class TestComplete:
    def test_what_the_file_leaves_out_is_as_the_code_says(self) -> None:
        job = complete(SPEC, DESCRIBED, 4)
        assert job.tier is Tier.ADAPTIVE
        assert (job.worker.min, job.worker.max) == (1, 4)
        assert (job.batch.initial, job.batch.max) == (100, 800)
        assert (job.batch.per_gpu_min, job.batch.per_gpu_max) == (10, 200)
        assert job.work.units_per_epoch == pytest.approx(10.0)

    def test_the_file_is_heard_first(self) -> None:
        spec = dataclasses.replace(
            SPEC, batch=BatchSpec(initial=100, max=200, per_gpu=(15, 25)), tier=Tier.ELASTIC, max_workers=2
        )
        job = complete(spec, DESCRIBED, 4)
        assert job.tier is Tier.ELASTIC
        assert job.worker.max == 2
        assert (job.batch.initial, job.batch.max, job.batch.per_gpu_max) == (100, 200, 25)
        assert job.work.units_per_epoch == pytest.approx(10.0)

    @pytest.mark.parametrize(
        ("asked", "rule"),
        [
            (BatchSpec(initial=3000), "initial is 3000, and the training code has a batch size of 100"),
            (BatchSpec(max=16), "max is 16, and the training code allows 100 to 800"),
            (BatchSpec(max=801), "max is 801, and the training code allows 100 to 800"),
            (BatchSpec(per_gpu=(5, 25)), r"per_gpu is \[5, 25\], and the training code allows 10 to 200"),
            (BatchSpec(per_gpu=(10, 201)), "allows 10 to 200"),
        ],
    )
    def test_the_file_cannot_ask_for_what_the_code_does_not_allow(self, asked: BatchSpec, rule: str) -> None:
        with pytest.raises(InputError, match=rule):
            complete(dataclasses.replace(SPEC, batch=asked), DESCRIBED, 4)

    def test_passes_that_the_code_forbids_cannot_be_asked_for(self) -> None:
        code = dataclasses.replace(DESCRIBED, accumulation=False)
        with pytest.raises(InputError, match="accumulate=False"):
            complete(dataclasses.replace(SPEC, batch=BatchSpec(accumulation=True)), code, 4)

    def test_code_that_keeps_its_batch_cannot_be_adaptive(self) -> None:
        spec = dataclasses.replace(SPEC, tier=Tier.ADAPTIVE)
        with pytest.raises(InputError, match="keeps its batch size"):
            complete(spec, dataclasses.replace(DESCRIBED, adaptive=False), 2)

    def test_a_command_is_rigid_unless_the_file_says_otherwise(self) -> None:
        spec = dataclasses.replace(SPEC, work=CommandLine(("true",)))
        assert complete(spec, None, 2).tier is Tier.RIGID
        assert complete(dataclasses.replace(spec, tier=Tier.ELASTIC), None, 2).tier is Tier.ELASTIC


def test_a_study_is_no_file_of_jobs(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    with pytest.raises(InputError, match=r"is a study, not a file of jobs\. `stretto tune .*study\.toml`"):
        read_jobs(tmp_path / "study.toml")


class TestEntry:
    @pytest.mark.parametrize(
        "text",
        [
            "def train(config, run): ...",
            "def train(config, run, extra=1): ...",
            "def train(*given): ...",
            "from elsewhere import train",
            "train = print",
            "if True:\n    def train(config, run): ...",
        ],
    )
    def test_functions_are_found_without_running_the_file(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "t.py").write_text(f"{text}\nraise SystemExit('it was run')\n")
        assert str(find_entry("t.py:train", tmp_path)) == f"{tmp_path}/t.py:train"

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("def train(run): ...", "does not take config and run"),
            ("def train(a, b, c): ...", "does not take config and run"),
            ("def other(a, b): ...", "has no function 'train'"),
            ("async def train(config, run): ...", "line 1: train is a coroutine, and not a function"),
            ("class train: ...", "is a class, and not"),
            ("train = 3", "is a value, and not"),
            ("train = [print]", "is a value, and not"),
        ],
    )
    def test_others_are_refused(self, tmp_path: Path, text: str, told: str) -> None:
        (tmp_path / "t.py").write_text(text)
        with pytest.raises(InputError, match=told):
            find_entry("t.py:train", tmp_path)


class TestFolder:
    def spec(self, x: int, started_at_s: float) -> RunSpec:
        asked = {"policy": "fifo", "seed": 0, "x": x}
        return RunSpec(kind="run", started_at_s=started_at_s, asked=asked, slots=2)

    def test_the_first_start_is_kept(self, tmp_path: Path) -> None:
        folder = run_folder("a", tmp_path)
        assert begin(folder, self.spec(1, 5.0)).started_at_s == 5.0
        assert begin(folder, self.spec(1, 9.0)).started_at_s == 5.0
        assert folder.spec() == self.spec(1, 5.0)
        with pytest.raises(InputError, match="x was 1 and is 2"):
            begin(folder, self.spec(2, 9.0))
        with pytest.raises(InputError, match=r"was begun by `stretto run`.*another --name"):
            check_same(folder, self.spec(1, 9.0), "tune", {})
        assert find_run("a", tmp_path) == folder == find_run(str(folder.path))

    def test_a_spoilt_file_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "spec.json").write_text("{")
        with pytest.raises(InputError, match="cannot be read as JSON"):
            RunFolder(tmp_path).spec()

    @pytest.mark.parametrize("lacking", ["kind", "started_at_s", "asked", "policy", "slots", "seed"])
    def test_one_that_lacks_something_is_told(self, tmp_path: Path, lacking: str) -> None:
        tables = dataclasses.asdict(self.spec(1, 5.0))
        (tables if lacking in tables else tables["asked"]).pop(lacking)
        (tmp_path / "spec.json").write_text(json.dumps(tables))
        with pytest.raises(InputError, match=f"does not say how a run was begun: .*{lacking}"):
            RunFolder(tmp_path).spec()

    @given(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3),
            max_leaves=8,
        )
    )
    def test_nothing_differs_from_itself(self, tables: object) -> None:
        assert list(differences(tables, tables)) == []


class TestDescribed:
    """What the training code says is believed of a run that was begun with it, and of no other."""

    def checked(self, folder: Path, tier: str) -> CheckedJobs:
        (folder / "train.py").write_text(SCRIPT)
        text = f'[[job]]\nname = "a"\nentry = "train.py:train"\nepochs = 3\ntier = "{tier}"\n'
        (folder / "jobs.toml").write_text(text)
        return check_run(RunRequest(jobs=folder / "jobs.toml", policy="fifo", slots=2, runs=folder / "runs"))

    def begun(self, checked: CheckedJobs, batch: int) -> list[str]:
        """What happens when the run is begun with code of this batch size, up to its first process."""
        seen: list[str] = []

        def describe(
            jobs: Sequence[JobSpec], target: OpenTarget, log: Path, *, tell: Tell
        ) -> dict[str, Described]:
            del target, log, tell
            seen.append("described")
            return {job.name: dataclasses.replace(DESCRIBED, adaptive=False, batch=batch) for job in jobs}

        def make(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
            del training, folder, clock
            raise KeyError("enough")

        with pytest.raises((InputError, KeyError)):
            start_run(checked, make=make, describe=describe, on_begun=lambda: seen.append("begun"))
        return seen

    def test_a_failed_attempt_leaves_nothing_to_believe(self, tmp_path: Path) -> None:
        assert self.begun(self.checked(tmp_path, "adaptive"), 10) == ["described"]
        assert not (tmp_path / "runs").exists()

    def test_without_a_run_it_is_asked_anew(self, tmp_path: Path) -> None:
        checked = self.checked(tmp_path, "elastic")
        checked.folder.path.mkdir(parents=True)
        checked.folder.write("described", {"a": dataclasses.asdict(DESCRIBED)})
        assert self.begun(checked, 20) == ["described", "begun"]
        assert (checked.folder.read("described") or {})["a"]["batch"] == 20
        assert self.begun(checked, 30) == ["begun"]
        assert (checked.folder.read("described") or {})["a"]["batch"] == 20


def test_slots_that_are_rented_for_commands_come_and_go(tmp_path: Path) -> None:
    substrate = CommandWorkers({}, tmp_path, slots=Slots(("", "")), clock=lambda: 1.0, rules=Rules())
    substrate.provision(Wish((("slot", 5),)))
    events = [substrate.next_event(2.0) for _ in range(4)]
    nodes = [event.node.id for event in events if isinstance(event, NodeAdded)]
    assert len(nodes) == 2
    substrate.provision(Wish((("slot", 1),), release=(nodes[0],)))
    assert substrate.next_event(2.0) == NodeReleased(t_s=1.0, node_id=nodes[0])
    substrate.close()


def test_real_jobs_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(TRAIN)
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(
        "".join(
            f'[[job]]\nname = "{name}"\nentry = "train.py:train"\nepochs = {epochs}\n'
            "config = { lr = 0.1 }\n"
            for name, epochs in (("one", 3), ("two", 5))
        )
    )
    assert [job.epochs for job in read_jobs(jobs).jobs] == [3, 5]
    checked = check_run(RunRequest(jobs=jobs, policy="fifo", slots=2))
    assert checked.policy.interval_s == INTERVAL_S
    result = start_run(checked)
    assert result.succeeded
    assert {job.id: job.epochs for job in result.jobs} == {"one": 3, "two": 5}
    assert all(job.checkpoint is not None and Path(job.checkpoint).is_file() for job in result.jobs)
    assert earlier_run_result(checked) == result
    assert all(0.0 <= (job.metrics["accuracy"] or 0.0) <= 1.0 for job in result.jobs)
    assert "| accuracy 0." in jobs_text(result)
    folder = checked.folder
    assert "| accuracy 0." in story_text(explain(folder))
    told = story_text(explain(folder, "two"))
    assert re.search(r"epoch 5: accuracy \S+ in \d+\.\d\d s with 1 worker\n", told), told


def test_functions_and_commands_share_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(TRAIN)
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(
        '[[job]]\nname = "function"\nentry = "train.py:train"\nepochs = 2\nconfig = { lr = 0.1 }\n'
        '[[job]]\nname = "command"\ncommand = ["echo", \'{"epoch": 3, "loss": 0.5}\']\nepochs = 3\n'
    )
    result = start_run(check_run(RunRequest(jobs=jobs, policy="pollux", slots=2)))
    assert result.succeeded
    assert {job.id: job.epochs for job in result.jobs} == {"function": 2, "command": 3}
    with pytest.raises(InputError, match="--store is for training functions"):
        check_run(RunRequest(jobs=jobs, policy="pollux", slots=2, store=str(tmp_path / "store")))
