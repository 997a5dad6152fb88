"""From decisions to instructions: nothing that a cluster cannot do, and only what changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_cluster, make_job, make_node, make_view
from stretto.control.instruct import check, instructions_for
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.errors import PolicyError
from stretto.core.instructions import Action
from stretto.core.job import Role
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView
from toy_world import runs, says

NODES = (make_node("0", gpu=4), make_node("1", gpu=4))
HERE, THERE = on_nodes({"0": 2}), on_nodes({"1": 2})


def cluster(*held: tuple[str, Allocation]) -> ClusterView:
    return make_cluster(
        NODES, [make_view(make_job(job_id, 2, least=1, most=8), allocation) for job_id, allocation in held]
    )


def told(view: ClusterView, decision: Decision) -> list[tuple[int, str, str]]:
    check(view, decision)
    return [(one.number, one.action.value, one.job_id) for one in instructions_for(view, decision, 7)]


class TestInstructions:
    def test_each_change_is_one_instruction_and_parking_comes_first(self) -> None:
        view = cluster(("new", NOTHING), ("grows", HERE), ("leaves", THERE), ("waits", NOTHING))
        decision = runs(new={"1": 2}, grows={"0": 3})
        reasons = {**decision.reasons, "leaves": says(ReasonCode.PREEMPTED), "waits": says(ReasonCode.WAITS)}
        assert told(view, replace(decision, reasons=reasons)) == [
            (7, "park", "leaves"),
            (8, "start", "new"),
            (9, "resize", "grows"),
        ]

    def test_a_job_that_stays_as_it_is_is_told_nothing(self) -> None:
        kept = Decision(allocations={"a": HERE})
        assert told(cluster(("a", HERE)), kept) == []
        assert told(cluster(("a", HERE)), replace(kept, batches={"a": BatchChoice(1)})) == []

    def test_only_the_batch_changes_in_place(self) -> None:
        decision = Decision(allocations={"a": HERE}, batches={"a": BatchChoice(64)})
        assert told(cluster(("a", HERE)), decision) == [(7, "set-batch", "a")]

    def test_a_resized_job_keeps_its_batch_unless_told_another(self) -> None:
        view = cluster(("a", HERE))
        decision = Decision(allocations={"a": THERE}, reasons={"a": says(ReasonCode.MOVED)})
        (instruction,) = instructions_for(view, decision, 1)
        assert instruction.action is Action.RESIZE
        assert instruction.batch == view.jobs[0].batch

    @given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([0, 1, 2])), max_size=8))
    def test_following_them_in_order_leads_to_what_was_decided(self, sizes: list[tuple[int, int]]) -> None:
        view = make_cluster(
            [make_node("0", gpu=16)],
            [
                make_view(make_job(f"j{i}", 1, least=1, most=8), on_nodes({"0": old}))
                for i, (old, _) in enumerate(sizes)
            ],
        )
        decision = runs(**{f"j{i}": {"0": new} for i, (_, new) in enumerate(sizes)})
        told = instructions_for(view, decision, 5)
        assert [one.number for one in told] == list(range(5, 5 + len(told)))
        had = {job.id: job.allocation.worker_count for job in view.jobs}
        gives_up = [one.allocation.worker_count < had[one.job_id] for one in told]
        assert gives_up == sorted(gives_up, reverse=True), "GPUs are given up before others take them"
        holds = {job.id: job.allocation for job in view.jobs}
        for one in told:
            assert bool(holds[one.job_id]) == (one.action is not Action.START)
            holds[one.job_id] = one.allocation
        assert holds == dict(decision.allocations)


class TestCheck:
    @pytest.mark.parametrize(
        ("decision", "words"),
        [
            (runs(ghost={"0": 1}), "not waiting or running"),
            (runs(a={"0": 5}), "over-allocated"),
            (runs(a={"gone": 1}), "not available"),
            (runs(a={"0": 4, "1": 4, "gone": 1}), "takes 1 to 8"),
            (Decision(allocations={}), "no reason"),
            (Decision(allocations={"a": THERE}), "no reason"),
            (
                Decision(
                    allocations={"a": Allocation((), (("0", 1),))}, reasons={"a": says(ReasonCode.WAITS)}
                ),
                "servers and no worker",
            ),
            (
                Decision(
                    allocations={"a": Allocation((("0", 1),), (("0", 1),))},
                    reasons={"a": says(ReasonCode.GREW)},
                ),
                "no such role",
            ),
        ],
    )
    def test_what_no_cluster_could_do_is_refused(self, decision: Decision, words: str) -> None:
        with pytest.raises(PolicyError, match=words):
            check(cluster(("a", HERE)), decision)

    def test_a_job_that_may_not_be_preempted_keeps_what_it_has(self) -> None:
        view = make_cluster(NODES, [make_view(make_job("a", 2, preemptible=False), HERE)])
        check(view, Decision(allocations={"a": HERE}))
        for other in (NOTHING, THERE):
            with pytest.raises(PolicyError, match="not preemptible"):
                check(view, Decision(allocations={"a": other}, reasons={"a": says(ReasonCode.MOVED)}))

    def test_a_job_may_stay_on_a_draining_node_and_nothing_else_may_go_there(self) -> None:
        view = replace(cluster(("a", HERE), ("b", NOTHING)), nodes=NODES[1:])
        waits = {"b": says(ReasonCode.WAITS)}
        check(view, Decision(allocations={"a": HERE}, reasons=waits))
        with pytest.raises(PolicyError, match="'0', which is not available"):
            check(view, replace(runs(a={"0": 3}), reasons={**waits, "a": says(ReasonCode.GREW)}))
        with pytest.raises(PolicyError, match="'0', which is not available"):
            check(view, replace(runs(b={"0": 1}), allocations={"a": HERE, "b": on_nodes({"0": 1})}))

    def test_servers_are_counted_and_take_room(self) -> None:
        server = Role(demand=Resources(gpu=1), requested=1, min=1, max=2)
        view = make_cluster(NODES, [make_view(make_job("ps", 2, server=server))])
        reasons = {"ps": says(ReasonCode.STARTED)}

        def gives(workers: int, servers: int) -> Decision:
            tasks = Allocation((("0", workers),), (("0", servers),))
            return Decision(allocations={"ps": tasks}, reasons=reasons)

        check(view, gives(2, 2))
        with pytest.raises(PolicyError, match="3 parameter servers"):
            check(view, gives(2, 3))
        with pytest.raises(PolicyError, match="over-allocated"):
            check(replace(view, nodes=(make_node("0", gpu=3),)), gives(2, 2))
