"""The story of a run: every change with its reason, and where the workers of a job were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from builders import make_job
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Node, Wish
from stretto.core.decision import Reason, ReasonCode
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeDraining,
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    RunStarted,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Tier
from stretto.core.resources import Resources
from stretto.runs.explain import StoryLine, cluster_lines, job_lines
from stretto.runs.folder import PastLimits, RunFolder, RunSpec
from stretto.runs.metrics_files import Metrics, metrics_by_epoch

WHY = Reason(ReasonCode.GREW, "more is better.")


def told(t_s: float, action: Action, allocation: Allocation) -> Decided:
    one = Instruction(1, action, "a", allocation, BatchChoice(1))
    return Decided(t_s=t_s, policy="p", instructions=(one,), reasons={"a": WHY}, memory=None)


def story(*events: Event) -> list[tuple[str, str]]:
    return [(line.what, line.text) for line in lines(events)]


def lines(events: Sequence[Event]) -> list[StoryLine]:
    return list(job_lines([JobSubmitted(t_s=0.0, job=make_job("a")), *events], "a"))[1:]


TWO = on_nodes({"n1": 1, "n2": 1})
STARTED = told(1.0, Action.START, on_nodes({"n1": 1}))
GREW = told(2.0, Action.RESIZE, TWO)


def test_a_resize_says_where_workers_are_and_where_they_were() -> None:
    why = "more is better."
    assert story(STARTED, GREW, told(3.0, Action.PARK, NOTHING)) == [
        ("start with 1 worker (n1: 1)", why),
        ("resize with 2 workers (n1: 1, n2: 1) instead of 1 worker (n1: 1)", f"grew: {why}"),
        ("pause of 2 workers (n1: 1, n2: 1)", why),
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
        ("resume with 2 workers (n3: 2)", "more is better."),
    ], "before, and once it stands still, it is no affair of the job's"


def test_a_retry_is_where_it_was() -> None:
    retried = JobRetried(t_s=3.0, job_id="a", attempt=1, error="gone")
    other = JobRetried(t_s=3.0, job_id="b", attempt=1, error="gone")
    assert story(GREW, retried, other)[1:] == [("retry 1 with 2 workers (n1: 1, n2: 1)", "gone")]


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
        ("batch", TWO.workers),
        ("node", ()),
    ]


def batched(t_s: float, action: Action, slots: int, atomic: int, reason: Reason) -> Decided:
    one = Instruction(1, action, "a", on_nodes({"n1": slots}), BatchChoice(atomic))
    return Decided(t_s=t_s, policy="p", instructions=(one,), reasons={"a": reason}, memory=None)


def test_a_change_of_batch_says_from_what_to_what_and_why() -> None:
    kept = Reason(ReasonCode.KEPT, "it has more goodput")
    events = (
        JobSubmitted(t_s=0.0, job=make_job("a", least=1, most=2, tier=Tier.ADAPTIVE)),
        batched(1.0, Action.START, 1, 64, Reason(ReasonCode.STARTED, "it is new.")),
        batched(2.0, Action.SET_BATCH, 1, 356, kept),
        batched(3.0, Action.RESIZE, 2, 200, WHY),
        batched(4.0, Action.RESIZE, 1, 400, Reason(ReasonCode.SHRANK, "others came.")),
        batched(5.0, Action.RESIZE, 1, 500, kept),
    )
    assert [(line.what, line.text) for line in job_lines(events, "a")][1:] == [
        ("start with 1 worker (n1: 1)", "it is new."),
        ("batch 64 becomes 356", "it has more goodput"),
        (
            "resize with 2 workers (n1: 2) instead of 1 worker (n1: 1)",
            "grew: more is better; batch 356 becomes 400",
        ),
        ("resize with 1 worker (n1: 1) instead of 2 workers (n1: 2)", "shrank: others came."),
        ("resize with 1 worker (n1: 1)", "it has more goodput; batch 400 becomes 500"),
    ]


def test_a_launch_that_failed_is_told_from_a_node_that_was_given_back() -> None:
    gone = (NodeReleased(t_s=1.0, node_id="n1", never_came=failed) for failed in (True, False))
    assert [line.text for line in cluster_lines(gone)] == ["it never came, and costs nothing", ""]


def test_one_slot_is_one_slot() -> None:
    nodes = tuple(Node(f"n{slots}", Resources(gpu=slots)) for slots in (1, 2))
    (line,) = cluster_lines([RunStarted(t_s=0.0, identity={"policy": "p"}, nodes=nodes)])
    assert line.text == "n1 with 1 slot, n2 with 2 slots"


PARKED = told(3.0, Action.PARK, NOTHING)
AGAIN = told(4.0, Action.START, on_nodes({"n1": 1}))


def test_the_story_of_a_run_has_every_change_in_order_of_time() -> None:
    wish = dataclasses.replace(told(6.0, Action.STOP, NOTHING), wish=Wish((("box", 1),)))
    found = [
        (line.t_s, line.subject, line.what) for line in cluster_lines([STARTED, GREW, PARKED, AGAIN, wish])
    ]
    assert found == [
        (1.0, "a", "start with 1 worker (n1: 1)"),
        (2.0, "a", "resize with 2 workers (n1: 1, n2: 1) instead of 1 worker (n1: 1)"),
        (3.0, "a", "pause of 2 workers (n1: 1, n2: 1)"),
        (4.0, "a", "resume with 1 worker (n1: 1)"),
        (6.0, "p", "wish"),
        (6.0, "a", "stop of 1 worker (n1: 1)"),
    ]


def test_who_holds_slots_when_a_run_stands_still_is_told_to_pause_and_go_on() -> None:
    rest = (RunPaused(t_s=3.0), RunResumed(t_s=9.0, down_s=6.0))
    stood_still = [
        ("pause of 2 workers (n1: 1, n2: 1)", "the run stands still."),
        ("resume with 2 workers (n1: 1, n2: 1)", "the run continues."),
    ]
    assert story(STARTED, GREW, *rest)[2:] == stood_still
    assert [line.places for line in lines([STARTED, GREW, *rest])][2:] == [(), TWO.workers]
    assert story(STARTED, GREW, rest[1])[2:] == stood_still[1:], "a run that was killed did not say"
    assert story(STARTED, JobFinished(t_s=2.5, job_id="a"), *rest)[1:] == [("finished", "")]
    of_run = [(line.subject, line.what) for line in cluster_lines([STARTED, *rest])]
    assert of_run[1:] == [
        ("run", "stopped"),
        ("a", "pause of 1 worker (n1: 1)"),
        ("run", "resumed"),
        ("a", "resume with 1 worker (n1: 1)"),
    ]


def test_why_a_job_keeps_its_size_is_part_of_its_story() -> None:
    kept = Reason(ReasonCode.KEPT, "A second slot saves nothing.")
    decided = Decided(t_s=2.0, policy="p", instructions=(), reasons={"a": kept}, memory=None)
    assert story(STARTED, decided)[1:] == [("kept", "A second slot saves nothing.")]


def test_the_best_checkpoint_is_told_once() -> None:
    saved = CheckpointSaved(t_s=2.0, job_id="a", work_done=1.0, path="x", best=True)
    later = dataclasses.replace(saved, t_s=3.0, path="y")
    resumed = RunResumed(t_s=4.0, down_s=1.0)
    again = dataclasses.replace(later, t_s=5.0)
    found = [text for what, text in story(STARTED, saved, later, resumed, again) if what == "checkpoint"]
    assert found == ["the best so far, x", "the best so far, y"]


def test_a_deadline_that_was_moved_is_what_ended_a_run() -> None:
    past = (
        PastLimits(until_s=100.0, deadline_s=60.0, budget_usd=None),
        PastLimits(until_s=300.0, deadline_s=200.0, budget_usd=None),
    )
    asked = {"policy": "p", "seed": 0}
    spec = RunSpec(kind="run", started_at_s=0.0, asked=asked, slots=1, past_limits=past)
    stops = [RunPaused(t_s=t_s) for t_s in (30.0, 61.0, 150.0, 200.0, 400.0)]
    assert [line.what for line in cluster_lines(stops, spec)] == [
        "stopped",
        "ended",
        "stopped",
        "ended",
        "stopped",
    ]


def test_what_a_command_prints_that_is_no_number_is_none_to_machines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics("a").parent.mkdir(parents=True)
    folder.metrics("a").write_text(
        '{"epoch": 1, "loss": NaN, "grad": -Infinity, "accuracy": 0.5, "text": "x"}\n'
        f'{{"epoch": 2, "loss": {10**400}}}\n'
        '{"epoch": 3, "lo'
    )
    assert metrics_by_epoch(folder, "a") == {
        1: {"loss": None, "grad": None, "accuracy": 0.5},
        2: {"loss": None},
    }


def test_epochs_of_a_job_say_what_it_reported_and_how_long_they_took() -> None:
    def report(t_s: float, epoch: int, resize_s: float | None = None) -> JobReported:
        return JobReported(t_s=t_s, job_id="a", work_done=1.0, epoch=epoch, resize_s=resize_s)

    events: list[Event] = [
        JobSubmitted(t_s=0.0, job=make_job("a")),
        STARTED,
        report(1.5, 0, resize_s=0.5),
        report(3.5, 1),
        report(7.5, 3),
        GREW,
        report(10.0, 4),
    ]
    metrics: dict[int, Metrics] = {1: {"accuracy": 0.5, "loss": None}, 3: {"accuracy": 0.75}}
    found = [line for line in job_lines(events, "a", metrics) if line.what.startswith("epoch")]
    assert [(line.what, line.text) for line in found] == [
        ("epoch 1", "accuracy 0.5, loss not a number in 2.00 s with 1 worker"),
        ("epoch 2", "in 2.00 s with 1 worker"),
        ("epoch 3", "accuracy 0.75 in 2.00 s with 1 worker"),
        ("epoch 4", ""),
    ], "how much of the last one was training with two, nobody knows"


def test_a_first_report_that_comes_late_does_not_shorten_the_first_epoch() -> None:
    late = JobReported(t_s=2.0, job_id="a", epoch=0, work_done=5.0, resize_s=0.25)
    ended = JobReported(t_s=3.0, job_id="a", epoch=1, work_done=10.0)
    found = lines([STARTED, late, ended])
    assert [(line.t_s, line.what) for line in found[1:]] == [(1.25, "trains"), (3.0, "epoch 1")]
    assert found[-1].text == "in 1.75 s with 1 worker"
