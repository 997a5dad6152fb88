"""Optimus with the truth, by hand: one GPU each, then the largest saving again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from builders import make_cluster, make_job, make_node, make_view
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.job import BatchLimits, Job
from stretto.policies.base import JobView
from stretto.policies.optimus.oracle import OptimusOracle


@dataclass(frozen=True)
class Told:
    """Step times 1 / workers s, plus a penalty per node beyond the first; steps to go by job."""

    steps: dict[str, float]
    network_s: float = 0.0
    floor_s: dict[str, float] = field(default_factory=dict)

    def remaining_steps(self, job: Job, epoch: int) -> float:
        return self.steps[job.id] - 10.0 * epoch

    def step_s(self, job: Job, workers: int, gpus_per_node: int) -> float:
        nodes = -(-workers // gpus_per_node)
        return max(1.0 / workers, self.floor_s.get(job.id, 0.0)) + self.network_s * (nodes - 1)


LIMITS = BatchLimits(initial=64, requested=64, max=64, per_gpu_min=8, per_gpu_max=64)


def job(
    name: str, held: Allocation = NOTHING, *, most: int = 8, epoch: int = 0, preemptible: bool = True
) -> JobView:
    made = make_job(name, 1, least=1, most=most, batch=LIMITS, preemptible=preemptible)
    return make_view(made, held, epoch=epoch)


def decide(oracle: Told, gpus: list[int], *jobs: JobView) -> Decision:
    nodes = [make_node(f"n{i}", gpu=count) for i, count in enumerate(gpus)]
    decision, _ = OptimusOracle(oracle=oracle).decide(
        make_cluster(nodes, jobs), None, np.random.default_rng(0)
    )
    return decision


def counts(decision: Decision) -> dict[str, int]:
    return {name: allocation.worker_count for name, allocation in decision.allocations.items()}


def test_gpus_go_out_by_marginal_gain() -> None:
    """A second, third, fourth GPU saves a (600 steps) 300, 100, 50 s; a second saves b (90 steps) 45 s."""
    told = Told({"a": 600.0, "b": 90.0})
    assert counts(decide(told, [6], job("a"), job("b"))) == {"a": 4, "b": 2}
    assert counts(decide(told, [5], job("a"), job("b"))) == {"a": 4, "b": 1}
    assert counts(decide(told, [4], job("a"), job("b"))) == {"a": 3, "b": 1}


def test_ties_go_to_the_earlier_job() -> None:
    told = Told({"a": 100.0, "b": 100.0})
    assert counts(decide(told, [3], job("b"), job("a"))) == {"b": 2, "a": 1}


def test_everybody_gets_one_before_anybody_gets_two() -> None:
    told = Told({"a": 1e6, "b": 1.0, "c": 1.0, "d": 1.0})
    decision = decide(told, [3], *(job(name) for name in "abcd"))
    assert counts(decision) == {"a": 1, "b": 1, "c": 1}
    assert decision.reasons["d"].code is ReasonCode.WAITS


def test_what_gains_nothing_is_left_free() -> None:
    told = Told({"a": 100.0}, floor_s={"a": 0.5})
    assert counts(decide(told, [8], job("a"))) == {"a": 2}


def test_growth_ends_at_the_first_step_that_gains_nothing() -> None:
    """A second node costs more than the fifth GPU saves, so four it is, though nine would be faster."""
    told = Told({"a": 100.0}, network_s=0.1)
    assert counts(decide(told, [4, 4, 4], job("a", most=12))) == {"a": 4}


def test_limits_of_the_role_and_of_the_batch_hold() -> None:
    told = Told({"a": 1e6, "b": 1e5})
    assert counts(decide(told, [32], job("a", most=3), job("b", most=32))) == {"a": 3, "b": 64 // 8}


def test_work_already_done_counts() -> None:
    told = Told({"a": 100.0, "b": 100.0})
    assert counts(decide(told, [3], job("a", epoch=5), job("b", epoch=1))) == {"a": 1, "b": 2}


def test_rigid_jobs_get_all_or_nothing() -> None:
    told = Told({"r": 1e6, "a": 1.0})
    rigid = make_view(make_job("r", 3, batch=LIMITS))
    assert counts(decide(told, [8], rigid, job("a", most=2))) == {"r": 3, "a": 2}
    assert counts(decide(told, [2], rigid, job("a", most=2))) == {"a": 2}


def test_unchanged_jobs_stay_and_others_go_small_ones_first_where_there_is_most_room() -> None:
    held = on_nodes({"n1": 1, "n0": 1})
    told = Told({"a": 600.0, "b": 150.0, "c": 10.0})
    decision = decide(told, [4, 3], job("a"), job("b", held, most=2), job("c", most=1))
    assert counts(decision) == {"a": 4, "b": 2, "c": 1}
    assert decision.allocations["b"] is held
    assert decision.allocations["c"].workers == (("n0", 1),)
    assert decision.allocations["a"].workers == (("n0", 2), ("n1", 2))


def test_a_job_that_may_not_be_preempted_is_not_touched() -> None:
    held = on_nodes({"n0": 2})
    told = Told({"np": 1e9, "a": 1.0})
    decision = decide(told, [4], job("a"), job("np", held, preemptible=False))
    assert decision.allocations["np"] is held
    assert counts(decision) == {"np": 2, "a": 2}


def test_batches_are_those_asked_for() -> None:
    decision = decide(Told({"a": 1e6}), [3], job("a"))
    assert decision.batches["a"] == BatchChoice(21)
