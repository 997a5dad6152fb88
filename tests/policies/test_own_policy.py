"""A policy of one's own: an object, a file, or a class of ten lines; and `check-policy` on it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import stretto
from stretto import InputError, Setup, catalogue_job, own_job, simulate
from stretto.cli.main import app
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision
from stretto.core.errors import PolicyError
from stretto.core.events import Decided
from stretto.journal.sqlite import SqliteJournal
from stretto.policies.base import ClusterView, JobView, Memory, Oracle, Policy
from stretto.policies.fifo import Fifo
from stretto.policies.ordered import OrderedPolicy
from stretto.policies.registry import make_policy, parse_options
from stretto.report.tables import metrics_text, unfinished_note
from stretto.testing.policies import PolicyConformance
from stretto.worlds.synthetic import demo_workload

MINE = """
from dataclasses import dataclass
from stretto.policies.ordered import OrderedPolicy

class LargestFirst(OrderedPolicy):
    def key(self, job):
        return -job.job.worker.requested

@dataclass(frozen=True, kw_only=True)
class Widest(OrderedPolicy):
    most: int = 2
    def key(self, job):
        return job.age_s
    def size(self, job, view):
        return max(job.job.worker.min, min(job.job.worker.max, self.most))

class Greedy(OrderedPolicy):
    def key(self, job):
        return 0
    def size(self, job, view):
        return job.job.worker.max + 1
"""


WRONG = """
from stretto.policies.ordered import OrderedPolicy

class NoKey(OrderedPolicy):
    pass

class NoKeyToSort(OrderedPolicy):
    def key(self, job):
        return None

class Halves(OrderedPolicy):
    def key(self, job):
        return 0
    def size(self, job, view):
        return 1.5

class Misspelt(OrderedPolicy):
    most: int = 2
    def key(self, job):
        return job.priority
"""


class LeastServiceFirst(OrderedPolicy):
    preempts = True

    def key(self, job: JobView) -> float:
        return job.attained_gpu_s

    def size(self, job: JobView, view: ClusterView) -> int:
        return max(job.job.worker.min, min(job.job.worker.requested, view.total_gpus))


class TestOrderedPolicyThatPreempts(PolicyConformance):
    def policy(self, oracle: Oracle) -> Policy:
        del oracle
        return LeastServiceFirst()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_an_object_is_simulated_under_its_own_name() -> None:
    run = simulate(demo_workload(), LeastServiceFirst(), Setup(nodes=gpu_nodes(4, 4)))
    assert run.metrics.policy == "least-service-first"
    assert run.metrics.completed == len(run.workload.jobs)


def test_a_file_gives_the_same_answer_as_its_object(mine: Path) -> None:
    by_name = make_policy(f"{mine}:LargestFirst")
    one = simulate(demo_workload(), by_name, Setup(nodes=gpu_nodes(4, 4)))
    other = simulate(demo_workload(), f"{mine}:LargestFirst", Setup(nodes=gpu_nodes(4, 4)))
    assert one.metrics.mean_jct_s == other.metrics.mean_jct_s
    assert other.metrics.policy == "largest-first"


def test_options_of_a_file_are_set_by_the_same_words(mine: Path) -> None:
    options = parse_options([f"{mine}:Widest.most=3"])
    policy = make_policy(f"{mine}:Widest", options=options[f"{mine}:Widest"])
    assert policy == type(policy)(most=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{mine}:LargestFrst", "Did you mean LargestFirst"),
        ("{mine}.py:Largest", "is not a file"),
        ("{broken}:X", "importing it raised ZeroDivisionError"),
        ("largest", "FILE.py:CLASS"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_the_remedy(mine: Path, name: str, said: str) -> None:
    broken = mine.with_name("broken.py")
    broken.write_text("1 / 0")
    with pytest.raises(InputError, match=said):
        make_policy(name.format(mine=mine, broken=broken))


def test_what_is_no_policy_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(InputError, match="lacks name, interval_s, wakes_on, decide"):
        simulate(demo_workload(), object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a class"):
        simulate(demo_workload(), LeastServiceFirst)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="options are given beside the object"):
        simulate(demo_workload(), LeastServiceFirst(), options={"p": "1"})


def test_check_policy_names_every_check_that_fails(mine: Path) -> None:
    answer = CliRunner().invoke(app, ["check-policy", f"{mine}:Greedy"])
    assert answer.exit_code == 1
    assert "FAILED  decisions can be carried out" in answer.output
    assert "return such a whole number from size()" in answer.output
    good = CliRunner().invoke(app, ["check-policy", "fifo"])
    assert good.exit_code == 0
    assert "FAILED" not in good.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoKey", "it cannot be made: .*abstract method key"),
        ("NoKeyToSort", "the keys of policy no-key-to-sort cannot be sorted"),
        ("Halves", "1.5 workers. It takes 1 to 64: return such a whole number"),
    ],
)
def test_a_slip_in_a_policy_is_said_with_the_remedy(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    with pytest.raises(InputError, match=said):
        simulate(demo_workload(), f"{file}:{name}")


def test_a_field_outside_a_dataclass_is_no_option(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    with pytest.raises(
        InputError, match=r"Its options: none\. Options are fields of a class with @dataclass"
    ):
        make_policy(f"{file}:Misspelt", options={"most": "3"})


def test_check_policy_says_which_line_of_the_file_raised(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    answer = CliRunner().invoke(app, ["check-policy", f"{file}:Misspelt", "--no-servers"])
    assert "no attribute 'priority' in wrong.py, line 20, in key" in answer.output


JOBS = [
    catalogue_job("resnet", "cifar10", gpus=4),
    catalogue_job("ncf", "ncf", tier="elastic", submit_s=30),
    own_job("mine", epochs=10, epoch_s=60),
    own_job("wide", epochs=8, epoch_s=80, gpus=2, max_gpus=8, speedup={1: 1.0, 2: 1.6}, submit_s=5),
]


@pytest.mark.parametrize("policy", [LeastServiceFirst(), "pollux", "optimus", "tetris"])
def test_a_workload_may_be_a_list_of_jobs(policy: Policy | str) -> None:
    run = simulate(JOBS, policy, Setup(nodes=gpu_nodes(4, 4)))
    assert run.metrics.workload == "jobs"
    assert run.metrics.completed == len(JOBS)
    assert [job.id for job in run.workload.jobs] == ["resnet", "mine", "wide", "ncf"]


def test_a_job_of_ones_own_takes_the_time_it_was_given() -> None:
    run = simulate(JOBS[2:], "fifo", Setup(nodes=gpu_nodes(1, 4), restart_s=30.0))
    jcts = {name: job.jct_s for name, job in run.history.jobs.items()}
    assert jcts == {"mine": pytest.approx(630.0), "wide": pytest.approx(8 * 80 / 1.6 + 30.0)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: catalogue_job("a", "cifar"), "job 'a': unknown application 'cifar'.* Did you mean cifar10"),
        (lambda: catalogue_job("a", "bert", batch=1), "batch size 1 of bert is outside the known 12..384"),
        (lambda: catalogue_job("a", "bert", tier="x"), "no tier 'x'. There are rigid, elastic, adaptive"),
        (lambda: own_job("a", epochs=0, epoch_s=1), "job 'a': epochs: 0 is out of range"),
        (lambda: own_job("a", epochs=1, epoch_s=0), "epoch_s: 0 is not a number above 0"),
        (lambda: own_job("a", epochs=1, epoch_s=1, gpus=4, max_gpus=2), "4 GPUs are requested"),
        (lambda: own_job("a", epochs=1, epoch_s=1, speedup={2: 2}), "does not start from one GPU"),
        (lambda: own_job("a", epochs=1, epoch_s=1, max_gpus=2000), "2000 is out of range"),
        (lambda: simulate([], "fifo"), r"workload: \[\] is no workload. Give a list of jobs"),
        (lambda: simulate([*JOBS, JOBS[0]], "fifo"), r"workload\[4\]: 'resnet' is there twice"),
        (lambda: simulate(["ncf"], "fifo"), r"workload\[0\]: 'ncf' is no SimulatedJob"),  # type: ignore[list-item]
        (lambda: Setup(nodes=4), "nodes: 4 is not a tuple of nodes"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_job_is_said_with_the_remedy(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_the_old_name_of_a_result_still_works() -> None:
    assert stretto.Run is stretto.SimulationResult


@dataclass(frozen=True, kw_only=True)
class Counting(OrderedPolicy):
    """Changes its memory in place, which the journal must see all the same."""

    def key(self, job: JobView) -> float:
        return job.age_s

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        decision, _ = super().decide(view, memory, rng)
        memory = memory or {"seen": []}
        memory["seen"].append(len(view.jobs))
        return decision, memory


def test_memory_that_is_changed_in_place_reaches_the_journal(tmp_path: Path) -> None:
    with closing(SqliteJournal(tmp_path / "journal.sqlite", run="counting")) as journal:
        simulate(demo_workload(), Counting(), Setup(nodes=gpu_nodes(4, 4)), journal=journal)
        memories = [event.memory["seen"] for event in journal.events() if isinstance(event, Decided)]
    assert [len(seen) for seen in memories] == list(range(1, len(memories) + 1))


def test_a_file_called_like_a_module_replaces_none(tmp_path: Path) -> None:
    file = tmp_path / "random.py"
    file.write_text(MINE)
    make_policy(f"{file}:LargestFirst")
    assert sys.modules["random"] is random


MISTAKES = """
from stretto.core.allocation import on_nodes
from stretto.core.decision import Decision
from stretto.policies.ordered import OrderedPolicy

class Zero(OrderedPolicy):
    def key(self, job):
        return 0

class NoAnswer(Zero):
    def decide(self, view, memory, rng):
        pass

class NoMemory(Zero):
    def decide(self, view, memory, rng):
        return Decision(allocations={})

class NoAllocation(Zero):
    def decide(self, view, memory, rng):
        return Decision(allocations={job.id: {"node-0": 1} for job in view.jobs}), memory

class Divides(OrderedPolicy):
    def key(self, job):
        return 1 / 0

class Attribute(OrderedPolicy):
    def key(self, job):
        return job.priority

class Signature(OrderedPolicy):
    def key(self):
        return 0

class Maker(Zero):
    def __init__(self):
        self.most = 3

class BadMaker(Zero):
    def __init__(self, interval_s=60.0):
        raise ValueError("no luck")
"""


@pytest.fixture
def mistakes(tmp_path: Path) -> Path:
    file = tmp_path / "mistakes.py"
    file.write_text(MISTAKES)
    return file


@pytest.mark.parametrize(
    ("name", "said", "cause"),
    [
        ("NoAnswer", r"policy no-answer: decide returned None; it must return \(Decision, memory\)\.", None),
        ("NoMemory", "decide returned a Decision without memory", None),
        ("NoAllocation", r"allocations\['.*'\] of its Decision is .*it must be of type Allocation", None),
        (
            "Divides",
            r"ZeroDivisionError: division by zero in mistakes.py, line 24, in key\. `stretto check-policy",
            ZeroDivisionError,
        ),
        ("Attribute", "AttributeError: .*'priority' in mistakes.py, line 28, in key", AttributeError),
        ("Signature", r"TypeError: .*; define it as key\(self, job\)\.", TypeError),
    ],
)
def test_a_mistake_while_deciding_is_one_sentence(
    mistakes: Path, name: str, said: str, cause: type[Exception] | None
) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        simulate(demo_workload(), f"{mistakes}:{name}")
    assert f"stretto check-policy {mistakes}:{name}`" in str(caught.value)
    assert type(caught.value.__cause__) is (cause or type(None))


def test_a_mistake_of_a_built_in_policy_is_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fifo, "decide", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        simulate(demo_workload(), "fifo")


def test_check_policy_says_a_mistake_once(mistakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mistakes.parent)
    answer = CliRunner().invoke(app, ["check-policy", "mistakes.py:NoAnswer"])
    assert answer.exit_code == 1
    assert answer.output.count("policy no-answer: decide returned None; it must return") == 1
    assert "The same in 9 other checks." in answer.output
    wrong = CliRunner().invoke(app, ["check-policy", "mistakes.py:Signature", "--no-servers"])
    assert wrong.output.count("define it as key(self, job)") == 1
    assert not Path(".hypothesis").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Maker", r"Delete __init__ of Maker: options are fields .*@dataclass\(frozen=True, kw_only=True\)"),
        ("BadMaker", "making it raised ValueError: no luck"),
    ],
)
def test_a_class_that_cannot_be_made_is_said_with_the_remedy(mistakes: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        simulate(demo_workload(), f"{mistakes}:{name}")


class Everything(OrderedPolicy):
    def key(self, job: JobView) -> float:
        return job.job.submit_s

    def size(self, job: JobView, view: ClusterView) -> int:
        del view
        return job.job.worker.max


def test_a_run_names_the_jobs_that_did_not_finish_and_why() -> None:
    jobs = [JOBS[2], *(own_job(f"wide-{i}", epochs=1, epoch_s=9, max_gpus=64) for i in range(5))]
    run = simulate(jobs, Everything(), Setup(nodes=gpu_nodes(1, 4)))
    assert unfinished_note(run) == (
        "everything on jobs: wide-0, wide-1, wide-2 and 2 more did not finish. wide-0 still waits: "
        "Needs 64 workers, which do not fit even on the empty cluster. Its key is 0."
    )
    text = metrics_text([run.metrics])
    assert "left 5 of 6 jobs unfinished; its completion times count finished jobs only." in text
    assert not unfinished_note(simulate(JOBS, "fifo", Setup(nodes=gpu_nodes(4, 4))))


@pytest.mark.parametrize(
    ("interval_s", "wakes_on", "said"),
    [
        (0, frozenset(), "policy: interval_s is 0. Give a number of seconds above 0"),
        ("60", frozenset(), "interval_s is '60'"),
        (60, "job-finished", "wakes_on is 'job-finished'. Give a set"),
        (60, {"job-finnished"}, "wakes_on has 'job-finnished', .*Did you mean job-finished"),
    ],
)
def test_a_policy_says_when_it_decides(interval_s: object, wakes_on: object, said: str) -> None:
    policy: Any = SimpleNamespace(name="mine", interval_s=interval_s, wakes_on=wakes_on, decide=None)
    with pytest.raises(InputError, match=said):
        simulate(JOBS, policy)


def test_the_example_of_the_guide_decides_everything_itself() -> None:
    guide = (Path(__file__).parents[2] / "docs/own-policy.md").read_text()
    code = next(part for part in guide.split("```python\n") if "def decide" in part).split("```")[0]
    names: dict[str, Any] = {"__name__": "guide"}
    exec(code, names)  # noqa: S102 - our own example
    policy: Policy = names["Exclusive"]()
    run = simulate(JOBS[:3], policy, Setup(nodes=gpu_nodes(2, 4)))
    assert run.metrics.completed == 3

    class TestGuide(PolicyConformance):
        with_servers = False

        def policy(self, oracle: Oracle) -> Policy:
            del oracle
            return policy

    TestGuide().test_decisions_can_be_carried_out()
    TestGuide().test_memory_survives_the_journal()
