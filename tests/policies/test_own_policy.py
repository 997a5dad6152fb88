"""A policy of one's own: an object, a file, or a class of ten lines; and `check-policy` on it."""

from __future__ import annotations

import random
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stretto import InputError, Setup, simulate
from stretto.cli.main import app
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision
from stretto.core.events import Decided
from stretto.journal.sqlite import SqliteJournal
from stretto.policies.base import ClusterView, JobView, Memory, Oracle, Policy
from stretto.policies.ordered import OrderedPolicy
from stretto.policies.registry import make_policy, parse_options
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
    assert "return such a number from size()" in answer.output
    good = CliRunner().invoke(app, ["check-policy", "fifo"])
    assert good.exit_code == 0
    assert "FAILED" not in good.output


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
