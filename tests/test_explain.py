"""The story of a job: where its workers were at every change."""

from __future__ import annotations

from collections.abc import Sequence

from builders import make_job
from stretto.app.explain import Line, cluster_lines, job_lines
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Node
from stretto.core.decision import Reason, ReasonCode
from stretto.core.events import (
    Decided,
    Event,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeDraining,
    NodeLost,
    NodeReleased,
    RunStarted,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.resources import Resources

WHY = Reason(ReasonCode.GREW, "more is better.")


def told(t_s: float, action: Action, allocation: Allocation) -> Decided:
    one = Instruction(1, action, "a", allocation, BatchChoice(1))
    return Decided(t_s=t_s, policy="p", instructions=(one,), reasons={"a": WHY}, memory=None)


def story(*events: Event) -> list[tuple[str, str]]:
    return [(line.what, line.text) for line in lines(events)]


def lines(events: Sequence[Event]) -> list[Line]:
    return list(job_lines([JobSubmitted(t_s=0.0, job=make_job("a")), *events], "a"))[1:]


TWO = on_nodes({"n1": 1, "n2": 1})
STARTED = told(1.0, Action.START, on_nodes({"n1": 1}))
GREW = told(2.0, Action.RESIZE, TWO)


def test_a_resize_says_where_workers_are_and_where_they_were() -> None:
    why = "grew: more is better."
    assert story(STARTED, GREW, told(3.0, Action.PARK, NOTHING)) == [
        ("start with 1 (n1: 1)", why),
        ("resize with 2 (n1: 1, n2: 1) instead of 1 (n1: 1)", why),
        ("park of 2 (n1: 1, n2: 1)", why),
    ]


def test_what_becomes_of_the_nodes_it_is_on_is_part_of_its_story() -> None:
    found = story(
        STARTED,
        NodeLost(t_s=1.5, node_id="n2"),
        GREW,
        NodeDraining(t_s=3.0, node_id="n2"),
        NodeLost(t_s=4.0, node_id="n2"),
        NodeReleased(t_s=5.0, node_id="n1"),
        told(6.0, Action.START, on_nodes({"n3": 2})),
    )
    assert found[2:] == [
        ("node draining", "n2, which had 1 of its 2 workers"),
        ("node lost", "n2, which had 1 of its 2 workers"),
        ("start with 2 (n3: 2)", "grew: more is better."),
    ], "before, and once it stands still, it is no affair of the job's"


def test_a_retry_is_where_it_was() -> None:
    retried = JobRetried(t_s=3.0, job_id="a", attempt=1, error="gone")
    other = JobRetried(t_s=3.0, job_id="b", attempt=1, error="gone")
    assert story(GREW, retried, other)[1:] == [("retry 1 with 2 (n1: 1, n2: 1)", "gone")]


def test_every_line_has_the_places_for_machines() -> None:
    report = JobReported(t_s=2.5, job_id="a", work_done=1.0, epoch=1, resize_s=0.1)
    batch = told(2.6, Action.SET_BATCH, TWO)
    lost = NodeLost(t_s=3.0, node_id="n1")
    found = [(line.what.split()[0], line.places) for line in lines([STARTED, GREW, report, batch, lost])]
    assert found == [
        ("start", (("n1", 1),)),
        ("resize", TWO.workers),
        ("trains", TWO.workers),
        ("epoch", TWO.workers),
        ("set-batch", TWO.workers),
        ("node", ()),
    ]


def test_a_launch_that_failed_is_told_from_a_node_that_was_given_back() -> None:
    gone = (NodeReleased(t_s=1.0, node_id="n1", never_came=failed) for failed in (True, False))
    assert [line.text for line in cluster_lines(gone)] == ["it never came, and costs nothing", ""]


def test_one_slot_is_one_slot() -> None:
    nodes = tuple(Node(f"n{slots}", Resources(gpu=slots)) for slots in (1, 2))
    (line,) = cluster_lines([RunStarted(t_s=0.0, identity={"policy": "p"}, nodes=nodes)])
    assert line.text == "n1 with 1 slot, n2 with 2 slots"
