"""Conformance tests for policies, to inherit. Needs hypothesis.

    class TestMine(PolicyConformance):
        def policy(self, oracle):
            return Mine()

Clusters and jobs are drawn at random, the same every time; the last test runs a small simulation.
"""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import ClassVar

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stretto.control.controller import Controller, Settings
from stretto.control.instruct import check, instructions_for
from stretto.core.allocation import NOTHING, Allocation
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.events import Decided, Event, JobFinished, JobSubmitted
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample
from stretto.core.resources import Resources
from stretto.core.seeds import child_rng
from stretto.core.source import Arrivals
from stretto.journal.base import MemoryJournal
from stretto.journal.codec import decode, encode
from stretto.policies.asking import ask
from stretto.policies.base import ClusterView, Memory, Oracle, Policy
from stretto.policies.common import change
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.testing.views import views
from stretto.worlds.oracle import WorldOracle
from stretto.worlds.truth import StepTime, Workload, make_workload

RANDOM_VIEWS = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=40,
    report_multiple_bugs=False,
    phases=[Phase.generate],  # making a failing cluster smaller takes minutes
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
ANSWER_S = 2.0
"""Longest time for a decision about a few jobs."""
LIMIT_S = 7 * 86400.0
"""Simulated time after which an unfinished job counts as lost."""


class FormulaOracle:
    """A made-up truth, for policies with an oracle."""

    def remaining_steps(self, job: Job, epoch: int) -> float:
        return max(10.0 - epoch, 1.0) * job.work.units_per_epoch

    def step_s(self, job: Job, workers: int, gpus_per_node: int) -> float:
        nodes = -(-workers // gpus_per_node)
        return 0.01 * job.batch.requested / workers + 0.05 * (workers > 1) + 0.1 * (nodes - 1)


class OddTruth:
    """A truth that no model describes: passes grow faster than their batch, waits with each doubling."""

    epochs = 4

    def __init__(self, units_per_epoch: float, initial_batch: int, pass_s: float, wait_s: float) -> None:
        self._units_per_epoch = units_per_epoch
        self._initial_batch = initial_batch
        self._pass_s = pass_s
        self._wait_s = wait_s

    def units_at(self, epoch: int) -> float:
        return self._units_per_epoch * epoch

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        pass_s = self._pass_s * (0.3 + 0.7 * (atomic / self._initial_batch) ** 1.3)
        spread = 1.0 + len(allocation.workers) ** 1.5
        wait_s = self._wait_s * spread * float(np.log2(allocation.worker_count))
        return StepTime(pass_s + wait_s, wait_s)

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        return NoiseSample(sqr=1.0, var=(1.0 + epoch) * (total_batch / self._initial_batch) ** 0.3)

    def loss_at(self, epoch: int) -> float | None:
        return 1.0 / (epoch + 0.5)


def odd_workload() -> Workload:
    """Six jobs of all tiers in five minutes, for a cluster of nodes with 4, 2 and 2 GPUs."""
    rng = child_rng(0, "conformance")
    known = []
    for index in range(6):
        tier = list(Tier)[index % 3]
        requested = (1, 2, 3, 4, 6)[index % 5]
        limits = BatchLimits(initial=32, requested=64, max=512, per_gpu_min=8, per_gpu_max=64)
        truth = OddTruth(
            float(rng.uniform(60, 200)), 32, float(rng.uniform(0.1, 0.4)), float(rng.uniform(0, 0.05))
        )
        job = Job(
            id=f"odd-{index}",
            application=f"odd-{index % 2}",
            submit_s=50.0 * index,
            worker=Role(
                demand=Resources(gpu=1),
                requested=requested,
                min=1,
                max=requested if tier is Tier.RIGID else 8,
            ),
            tier=tier,
            batch=limits,
            work=Work(units_per_epoch=truth.units_at(1), epochs=OddTruth.epochs),
            preemptible=index != 3,
        )
        known.append((job, truth))
    return make_workload("odd", known)


class PolicyConformance(ABC):
    """Inherit from this, and define `policy`."""

    with_servers: ClassVar[bool] = True
    """Whether the policy handles parameter servers, and tasks that need CPU or memory."""

    @abstractmethod
    def policy(self, oracle: Oracle) -> Policy:
        """A new policy; `oracle` is for policies with an oracle."""

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_decisions_can_be_carried_out(self, data: st.DataObject) -> None:
        view = data.draw(views(servers=self.with_servers))
        decision = self._decide(view)
        check(view, decision)
        instructions_for(view, decision, 1)
        _assert_within_nodes(view, decision)
        _assert_whole_gangs(view, decision)

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_no_job_is_lost_and_every_change_and_wait_has_a_reason(self, data: st.DataObject) -> None:
        view = data.draw(views(servers=self.with_servers))
        decision = self._decide(view)
        assert set(decision.allocations) <= {job.id for job in view.jobs}
        for job in view.jobs:
            code = change(job.allocation, decision.allocations.get(job.id, NOTHING))
            if code is ReasonCode.KEPT:
                continue
            assert job.id in decision.reasons, f"{job.id} is {code} without a reason"
            assert decision.reasons[job.id].code is code
            assert decision.reasons[job.id].text.strip()

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_batches_are_within_their_limits(self, data: st.DataObject) -> None:
        view = data.draw(views(servers=self.with_servers))
        decision = self._decide(view)
        for job in view.jobs:
            new = decision.allocations.get(job.id, NOTHING)
            if new and job.id in decision.batches:
                batch, limits = decision.batches[job.id], job.job.batch
                assert 1 <= batch.atomic <= limits.per_gpu_max
                assert batch.accumulation >= 0
                assert batch.total(new.worker_count) <= limits.max

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_the_same_question_gets_the_same_answer_and_changes_nothing(self, data: st.DataObject) -> None:
        view = data.draw(views(servers=self.with_servers))
        before = deepcopy(view)
        _, memory = self._ask(view, None)
        kept = deepcopy(memory)
        answers = [self._ask(view, memory) for _ in range(2)]
        assert answers[0] == answers[1]
        assert view == before
        assert memory == kept

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_memory_survives_the_journal(self, data: st.DataObject) -> None:
        view = data.draw(views(servers=self.with_servers))
        decision, memory = self._ask(view, None)
        assert json.loads(json.dumps(memory, allow_nan=False)) == memory
        event = Decided(
            t_s=view.now_s,
            policy=self.policy(FormulaOracle()).name,
            instructions=instructions_for(view, decision, 1),
            reasons=dict(decision.reasons),
            memory=memory,
            wake_at_s=decision.wake_at_s,
        )
        read = decode(event.kind, encode(event))
        assert read == event
        later = replace(view, now_s=view.now_s + 60.0)
        assert self._ask(later, event.memory) == self._ask(later, json.loads(json.dumps(memory)))

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_nothing_new_is_placed_on_a_node_that_drains(self, data: st.DataObject) -> None:
        drawn = data.draw(views(servers=self.with_servers, draining=True))
        jobs = tuple(replace(job, job=replace(job.job, preemptible=True)) for job in drawn.jobs)
        view = replace(drawn, jobs=jobs)
        decision = self._decide(view)
        check(view, decision)
        here = {node.id for node in view.nodes}
        for job in view.jobs:
            new = decision.allocations.get(job.id, NOTHING)
            assert new == job.allocation or here.issuperset(new.nodes)

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_jobs_that_may_not_be_preempted_stay_even_on_a_node_that_drains(
        self, data: st.DataObject
    ) -> None:
        view = data.draw(views(servers=self.with_servers, draining=True))
        check(view, self._decide(view))

    @RANDOM_VIEWS
    @given(data=st.data())
    def test_a_cluster_without_nodes_lets_every_job_wait(self, data: st.DataObject) -> None:
        drawn = data.draw(views(servers=self.with_servers))
        jobs = tuple(replace(job, allocation=NOTHING, batch=None) for job in drawn.jobs)
        view = replace(drawn, nodes=(), jobs=jobs)
        decision = self._decide(view)
        check(view, decision)
        assert not any(decision.allocations.values())

    def test_without_jobs_there_is_nothing_to_decide(self) -> None:
        for nodes in ((), gpu_nodes(3, 4)):
            decision = self._decide(ClusterView(now_s=0.0, nodes=nodes, jobs=()))
            assert not decision.allocations
            assert not decision.reasons

    def test_a_world_unlike_any_model_ends_every_job_and_repeats_itself(self) -> None:
        events = self._simulate(seed=1)
        submitted = [event.job.id for event in events if isinstance(event, JobSubmitted)]
        finished = [event.job_id for event in events if isinstance(event, JobFinished)]
        assert len(submitted) == len(odd_workload().jobs)
        assert sorted(finished) == sorted(submitted)
        assert self._simulate(seed=1) == events

    def _ask(self, view: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        with _time_limit(ANSWER_S):
            return ask(self.policy(FormulaOracle()), view, memory, np.random.default_rng(0))

    def _decide(self, view: ClusterView) -> Decision:
        return self._ask(view, None)[0]

    def _simulate(self, seed: int) -> Sequence[Event]:
        workload, journal = odd_workload(), MemoryJournal()
        Controller(
            policy=self.policy(WorldOracle(workload.truths)),
            substrate=SimSubstrate(
                workload.truth_of, physics=Physics(noise=0.02, interference=0.2), seed=seed
            ),
            journal=journal,
            nodes=[Node("large", Resources(gpu=4)), *gpu_nodes(2, 2)],
            arrivals=Arrivals(workload.jobs),
            settings=Settings(seed=seed, until_s=LIMIT_S),
        ).run()
        return list(journal.events())


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Fails instead of hanging, if the platform has timers."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"no decision after {seconds:g} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _assert_within_nodes(view: ClusterView, decision: Decision) -> None:
    taken: dict[str, Resources] = {}
    for job in view.jobs:
        for node, used in decision.allocations.get(job.id, NOTHING).uses(job.job).items():
            taken[node] = taken.get(node, Resources()) + used
    capacity = {node.id: node.capacity for node in view.nodes}
    for node, used in taken.items():
        assert node in capacity, f"there is no node {node}"
        assert used.fits_in(capacity[node]), f"{used} of {capacity[node]} taken on {node}"


def _assert_whole_gangs(view: ClusterView, decision: Decision) -> None:
    for job in view.jobs:
        new = decision.allocations.get(job.id, NOTHING)
        if job.allocation and not job.job.preemptible:
            assert new == job.allocation, f"{job.id} may not be preempted"
        if not new or new == job.allocation:
            continue
        assert all(count > 0 for _, count in (*new.workers, *new.servers))
        assert len(dict(new.workers)) == len(new.workers)
        assert len(dict(new.servers)) == len(new.servers)
        for role, count in ((job.job.worker, new.worker_count), (job.job.server, new.server_count)):
            if role is None:
                assert count == 0
            elif job.job.tier is Tier.RIGID:
                assert count == role.requested, f"{job.id} is rigid and got {count} of {role.requested}"
            else:
                assert role.min <= count <= role.max
