"""The gang as a state machine, without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_theatre import RULES, Theatre
from stretto.core.allocation import BatchChoice
from stretto.core.events import JobFailed, JobFinished, JobNoted, JobReported, JobRetried
from stretto.core.instructions import Action
from stretto.substrate.elastic.crew import Goal, Phase
from stretto.substrate.elastic.effects import Effect, Moment, Rules
from stretto.substrate.elastic.gang import Gang
from stretto.substrate.elastic.reports import Held
from stretto.wire.messages import (
    Ack,
    Beat,
    EpochEnd,
    Failed,
    Finished,
    FinishEpoch,
    Form,
    Leave,
    Left,
    Park,
    Report,
    SetBatch,
)

Ending = Callable[[Gang, Moment], list[Effect]]
ACTS = ["get going", "place", "warm", "meet", "obey", "bury", "die", "raise", "wait", "report", "lie still"]


def act(theatre: Theatre, what: str, which: int) -> None:  # noqa: C901 - a list of what may happen
    there = theatre.placed()
    someone = there[which % len(there)] if there else None
    match what:
        case "get going":
            theatre.get_going()
        case "place":
            theatre.place()
        case "warm" if someone:
            theatre.warm_up(someone)
        case "meet":
            theatre.meet()
        case "obey":
            theatre.obey()
        case "bury":
            theatre.bury()
        case "die" if someone:
            theatre.die(someone)
        case "raise" if someone:
            theatre.say(someone, Failed("Traceback"))
            theatre.die(someone, 1)
        case "report":
            theatre.report()
        case "wait":
            theatre.wait(7.0)
        case "lie still":
            theatre.wait(31.0, beating=False)


ORDERS = st.tuples(
    st.sampled_from([Action.START, Action.RESIZE, Action.PARK, Action.SET_BATCH]), st.integers(1, 3)
)
HAPPENINGS = st.lists(st.one_of(ORDERS, st.tuples(st.sampled_from(ACTS), st.integers(0, 5))), max_size=40)


def play(theatre: Theatre, happenings: list[tuple[Action | str, int]]) -> None:
    for what, number in happenings:
        if isinstance(what, Action):
            theatre.tell(what, 0 if what is Action.PARK else number, BatchChoice(number))
        else:
            act(theatre, what, number)


RETRIES = st.sampled_from([0, 2, 50])


def with_retries(retries: int) -> Theatre:
    return Theatre(slots=3, rules=replace(RULES, retries=retries))


@given(HAPPENINGS, RETRIES, st.sampled_from([Action.PARK, Action.STOP]))
def test_a_gang_that_is_parked_or_stopped_holds_nothing_whatever_happened(
    happenings: list[tuple[Action | str, int]], retries: int, end: Action
) -> None:
    theatre = with_retries(retries)
    play(theatre, happenings)
    theatre.tell(end)
    theatre.cooperate()
    assert theatre.puppets == {}
    assert all(pool.held == 0 for pool in theatre.pools.values())
    assert not theatre.gang.busy
    ends = [e for e in theatre.events if isinstance(e, JobFailed | JobFinished)]
    assert len(ends) <= 1


@given(HAPPENINGS, RETRIES, st.integers(1, 3))
def test_a_gang_comes_to_train_with_what_it_was_last_given(
    happenings: list[tuple[Action | str, int]], retries: int, workers: int
) -> None:
    theatre = with_retries(retries)
    play(theatre, happenings)
    theatre.tell(Action.RESIZE, workers)
    theatre.cooperate()
    if any(isinstance(event, JobFailed) for event in theatre.events):
        assert theatre.puppets == {}
        return
    assert theatre.trains is not None
    assert theatre.trains.world == len(theatre.group()) == len(theatre.puppets) == workers


@given(HAPPENINGS, RETRIES)
def test_a_killed_gang_is_gone(happenings: list[tuple[Action | str, int]], retries: int) -> None:
    theatre = with_retries(retries)
    play(theatre, happenings)
    theatre._do(theatre.gang.kill(theatre.now))
    theatre.bury()
    assert theatre.puppets == {}
    assert theatre.gang.phase is Phase.IDLE


def test_newcomers_warm_up_while_the_group_trains() -> None:
    theatre = Theatre(slots=3)
    theatre.started(1)
    theatre.tell(Action.RESIZE, 3)
    theatre.place()
    first, *new = theatre.placed()
    theatre.warm_up(new[0])
    assert len(theatre.messages(Form)) == 1, "the group was disturbed before all newcomers were ready"
    theatre.warm_up(new[1])
    forms = theatre.sent[-3:]
    assert [(worker, form.rank, form.world) for worker, form in forms if isinstance(form, Form)] == [
        (first, 0, 3),
        (new[0], 1, 3),
        (new[1], 2, 3),
    ]
    assert all(isinstance(form, Form) and form.share_state and form.generation == 1 for _, form in forms)


def test_a_smaller_group_is_formed_at_once_and_the_last_leave() -> None:
    theatre = Theatre(slots=3)
    theatre.started(3)
    theatre.tell(Action.RESIZE, 1)
    (stays, form), (one, leave), (other, _) = theatre.sent[-3:]
    assert isinstance(form, Form)
    assert (form.rank, form.world, form.share_state) == (0, 1, False)
    assert leave == Leave(1)
    assert [stays, one, other] == theatre.placed()
    theatre.cooperate()
    assert theatre.placed() == [stays]


def test_the_last_of_several_resizes_wins_and_no_group_is_formed_before_the_last_one_trains() -> None:
    theatre = Theatre(slots=3)
    theatre.started(2)
    theatre.tell(Action.RESIZE, 1)
    theatre.tell(Action.RESIZE, 3)
    theatre.tell(Action.RESIZE, 2)
    theatre.place()
    assert max(f.generation for f in theatre.messages(Form) if isinstance(f, Form)) == 1
    theatre.cooperate()
    assert theatre.trains is not None
    assert theatre.trains.world == 2


def test_a_resize_that_is_taken_back_leaves_the_group_alone() -> None:
    theatre = Theatre(slots=2)
    theatre.started(1)
    theatre.tell(Action.RESIZE, 2)
    theatre.place()
    theatre.tell(Action.RESIZE, 1)
    theatre.cooperate()
    assert len(theatre.messages(Form)) == 1
    assert len(theatre.placed()) == 1


def test_a_resize_to_as_many_workers_elsewhere_changes_no_process() -> None:
    theatre = Theatre(slots=2)
    theatre.started(2)
    before = list(theatre.puppets)
    theatre.tell(Action.RESIZE, 2)
    theatre.cooperate()
    assert list(theatre.puppets) == before
    assert len(theatre.messages(Form)) == 2


def test_parking_in_the_middle_of_a_resize_sends_newcomers_away() -> None:
    theatre = Theatre(slots=2)
    theatre.started(1)
    theatre.tell(Action.RESIZE, 2)
    theatre.place()
    theatre.tell(Action.PARK)
    assert isinstance(theatre.sent[-1][1], Park)
    theatre.cooperate()
    assert theatre.puppets == {}


def test_parking_while_a_group_forms_waits_until_it_has() -> None:
    theatre = Theatre(slots=2)
    theatre.started(2)
    theatre.tell(Action.RESIZE, 1)
    theatre.tell(Action.PARK)
    assert not theatre.messages(Park)
    theatre.meet()
    assert len(theatre.messages(Park)) == 1


def test_a_job_started_again_while_it_leaves_starts_when_the_last_worker_is_gone() -> None:
    theatre = Theatre(slots=2)
    theatre.started(1)
    (old,) = theatre.placed()
    theatre.tell(Action.PARK)
    theatre.tell(Action.START, 2)
    assert list(theatre.puppets) == [old]
    theatre.cooperate()
    assert len(theatre.placed()) == 2
    assert old not in theatre.puppets


def test_a_lost_newcomer_is_retried_and_then_done_without() -> None:
    theatre = Theatre(slots=2)
    theatre.started(1)
    survivor = theatre.placed()[0]
    theatre.tell(Action.RESIZE, 2)
    for _ in range(RULES.retries + 1):
        theatre.place()
        theatre.die(theatre.placed()[-1])
    theatre.cooperate()
    assert theatre.placed() == [survivor]
    assert len(theatre.messages(Form)) == 1, "the survivor noticed"
    (note,) = [event for event in theatre.events if isinstance(event, JobNoted)]
    assert "stays 1," in note.text
    assert "memory" in note.text
    theatre.tell(Action.RESIZE, 2)
    theatre.cooperate()
    assert len(theatre.placed()) == 2, "a new instruction is tried anew"


def test_the_best_explanation_of_a_loss_is_told() -> None:
    theatre = Theatre(slots=3)
    theatre.started(3)
    leader, second, third = theatre.placed()
    theatre.say(leader, Left("peer lost"))
    theatre.die(second)
    theatre.say(third, Failed("Traceback: mine"))
    theatre.die(third, 1)
    theatre.die(leader, 0)
    (retried,) = [event for event in theatre.events if isinstance(event, JobRetried)]
    assert (retried.error, retried.log) == ("Traceback: mine", "log")


def test_members_of_a_broken_group_that_do_not_notice_are_killed_after_the_grace() -> None:
    theatre = Theatre(slots=2)
    theatre.started(2)
    stuck, dead = theatre.placed()
    theatre.die(dead)
    theatre.wait(9.0)
    assert theatre.placed() == [stuck]
    theatre.wait(2.0)
    assert theatre.placed() == []


def test_attempts_are_counted_from_the_last_progress() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    for progress in (False, False, True, False):
        if progress:
            theatre.report()
        theatre.die(theatre.placed()[0])
        theatre.cooperate()
    attempts = [event.attempt for event in theatre.events if isinstance(event, JobRetried)]
    assert attempts == [1, 2, 1, 2]
    theatre.die(theatre.placed()[0])
    assert isinstance(theatre.events[-1], JobFailed)
    assert theatre.gang.goal is Goal.OVER


def test_epochs_repeated_after_a_fall_back_are_told_once() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    for epoch in (1, 2, 2, 3):
        theatre.report(epoch)
    reports = [event for event in theatre.events if isinstance(event, JobReported)]
    assert [[result.epoch for result in report.results] for report in reports] == [[1], [2], [], [3]]
    assert [[point.epoch for point in report.losses] for report in reports] == [[1], [2], [], [3]]


def test_what_a_parked_job_reports_is_told_when_it_runs_again() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    theatre.tell(Action.PARK)
    theatre.report(1)
    assert isinstance(theatre.sent[-1][1], Ack), "it must not wait for a decision that never comes"
    assert not any(isinstance(event, JobReported) for event in theatre.events)
    theatre.cooperate()
    theatre.started(1)
    theatre.report(2)
    results = [r.epoch for e in theatre.events if isinstance(e, JobReported) for r in e.results]
    assert results == [1, 2]


def results_of(theatre: Theatre) -> list[tuple[int, int]]:
    """Epoch and workers of each."""
    reports = [event for event in theatre.events if isinstance(event, JobReported)]
    return [(result.epoch, result.workers) for report in reports for result in report.results]


def test_what_a_parked_job_reports_is_told_with_the_workers_it_had() -> None:
    theatre = Theatre(slots=2)
    theatre.started(2)
    theatre.tell(Action.PARK)
    theatre.report(1)
    theatre.cooperate()
    theatre.started(1)
    theatre.report(2)
    assert results_of(theatre) == [(1, 2), (2, 1)]


@pytest.mark.parametrize("end", [Gang.close, Gang.kill])
@pytest.mark.parametrize("has_left", [True, False])
def test_what_a_parked_job_reports_is_told_when_the_run_ends(end: Ending, has_left: bool) -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    theatre.tell(Action.PARK)
    theatre.report(1)
    if has_left:
        theatre.cooperate()
    theatre._do(end(theatre.gang, theatre.now))
    assert results_of(theatre) == [(1, 1)]


def test_what_a_parked_job_reports_while_the_run_ends_is_told() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    theatre.tell(Action.PARK)
    theatre._do(theatre.gang.close(theatre.now))
    theatre.report(1)
    assert results_of(theatre) == [(1, 1)]


def test_what_was_on_its_way_when_a_late_job_was_killed_is_told() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    (worker,) = theatre.placed()
    theatre.tell(Action.PARK)
    theatre.wait(RULES.park_s + 1.0)
    assert theatre.placed() == []
    end = EpochEnd(epoch=1, values={"accuracy": 0.5}, epoch_s=1.0)
    theatre.say(worker, Report(progress=1.0, epoch=1, steps=1, ends=(end,)))
    theatre.cooperate()
    theatre.started(1)
    theatre.report(2)
    assert results_of(theatre) == [(1, 1), (2, 1)]


def test_what_a_parked_job_reports_is_told_when_it_is_stopped() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    theatre.tell(Action.PARK)
    theatre.report(1)
    theatre.cooperate()
    theatre.tell(Action.STOP)
    assert results_of(theatre) == [(1, 1)]


def test_what_a_parked_job_reports_is_told_before_it_fails() -> None:
    theatre = with_retries(0)
    theatre.started(1)
    theatre.tell(Action.PARK)
    theatre.report(1)
    theatre.cooperate()
    theatre.tell(Action.START, 1)
    theatre.place()
    theatre.die(theatre.placed()[0])
    assert [event.kind for event in theatre.events[-2:]] == ["job-reported", "job-failed"]


def test_code_may_evaluate_for_long_but_not_for_ever() -> None:
    theatre = Theatre(slots=1, rules=Rules(retries=0))
    theatre.started(1)
    (worker,) = theatre.placed()
    idle_s = 0.0
    while theatre.placed() and idle_s < 2 * Rules().hang_s:
        theatre.now = replace(theatre.now, awake_s=theatre.now.awake_s + 25.0)
        theatre.say(worker, Beat(steps=7))
        theatre._do(theatre.gang.tick(theatre.now))
        idle_s += 25.0
    assert idle_s >= 3600.0
    theatre.bury()
    (failed,) = [event for event in theatre.events if isinstance(event, JobFailed)]
    assert "no step was taken for 3600 s (Rules.hang_s" in failed.error


def test_a_start_is_timed_from_the_instruction_and_told_once() -> None:
    theatre = Theatre(slots=2)
    theatre.tell(Action.START, 1)
    theatre.wait(3.0)
    theatre.place()
    theatre.warm_up(theatre.placed()[0])
    theatre.wait(1.5)
    theatre.meet()
    theatre.report()
    theatre.report()
    times = [event.resize_s for event in theatre.events if isinstance(event, JobReported)]
    assert times == [pytest.approx(4.5), None]


def test_a_batch_is_changed_in_place_and_only_when_it_is_another() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    for size in (32, 32):
        theatre.tell(Action.SET_BATCH, 1, BatchChoice(size))
    (order,) = theatre.messages(SetBatch)
    assert isinstance(order, SetBatch)
    assert order.batch.atomic == 32


def test_a_job_is_finished_when_all_its_workers_are() -> None:
    theatre = Theatre(slots=3)
    theatre.started(2)
    one, other = theatre.placed()
    theatre.tell(Action.RESIZE, 3)
    theatre.place()
    theatre.say(one, Finished())
    theatre.die(one, 0)
    assert not any(isinstance(event, JobFinished) for event in theatre.events)
    theatre.say(other, Finished())
    assert isinstance(theatre.events[-1], JobFinished)
    theatre.cooperate()
    assert theatre.puppets == {}
    assert sum(isinstance(event, JobFinished) for event in theatre.events) == 1


def test_what_a_lost_group_had_written_down_is_told_before_the_job_is_finished() -> None:
    """It had saved its last epoch, so that the next group finds nothing to train, and tells nothing."""
    theatre = Theatre(slots=1)
    theatre.started(1)
    end = EpochEnd(epoch=6, values={"accuracy": 0.6}, epoch_s=None)
    last = Held(Report(progress=6.0, epoch=6, steps=0, ends=(end,)), workers=1, nodes=1)
    theatre.account.written = lambda epoch, nodes: [last] if epoch < 6 and nodes == 1 else []
    (lost,) = theatre.placed()
    theatre.die(lost)
    theatre.get_going()
    (other,) = theatre.placed()
    theatre.say(other, Finished())
    *_, told, finished = theatre.events
    assert isinstance(finished, JobFinished)
    assert isinstance(told, JobReported)
    assert [(result.epoch, result.value) for result in told.results] == [(6, 0.6)]


def test_code_that_returns_without_training_is_finished() -> None:
    theatre = Theatre(slots=2)
    theatre.tell(Action.START, 2)
    theatre.place()
    for worker_id in theatre.placed():
        theatre.say(worker_id, Finished())
        theatre.die(worker_id, 0)
    assert [event.kind for event in theatre.events] == ["job-finished"]


def test_workers_that_disagree_whether_to_train_are_lost() -> None:
    theatre = Theatre(slots=2)
    theatre.tell(Action.START, 2)
    theatre.place()
    one, other = theatre.placed()
    theatre.say(one, Finished())
    theatre.warm_up(other)
    theatre.cooperate()
    assert any(
        "finished while others still train" in e.error for e in theatre.events if isinstance(e, JobRetried)
    )


def test_an_epoch_can_be_finished_first() -> None:
    theatre = Theatre(slots=2)
    theatre.started(2)
    theatre._do(theatre.gang.finish_epoch(theatre.now))
    assert len(theatre.messages(FinishEpoch)) == 1
    theatre.wait(500.0)
    assert len(theatre.placed()) == 2, "an epoch may take its time"
    theatre.report()
    assert isinstance(theatre.events[-2], JobReported)
    theatre._do(theatre.gang.close(theatre.now))
    assert len(theatre.messages(Park)) == 1, "closing does not wait for the epoch"
    theatre.cooperate()
    assert theatre.puppets == {}


def test_sleep_of_the_machine_is_not_silence() -> None:
    theatre = Theatre(slots=1)
    theatre.started(1)
    theatre.now = replace(theatre.now, t_s=theatre.now.t_s + 3600.0)
    theatre._do(theatre.gang.tick(theatre.now))
    assert len(theatre.placed()) == 1
    theatre.wait(31.0, beating=False)
    assert theatre.placed() == []


def notes(theatre: Theatre) -> list[str]:
    return [event.text for event in theatre.events if isinstance(event, JobNoted)]


@pytest.mark.parametrize(
    ("born", "doing"),
    [
        (False, "the training code was still being imported"),
        (True, "the training function had not come to run.epochs() or run.steps()"),
    ],
)
def test_a_gang_that_takes_long_to_begin_says_what_it_is_at_and_so_it_does_at_the_end(
    born: bool, doing: str
) -> None:
    theatre = Theatre(slots=1)
    theatre.tell(Action.START, 1)
    theatre.wait(100.0)
    assert notes(theatre) == [], "it has no slot yet"
    if born:
        theatre.place()
    else:
        theatre._do(theatre.gang.seated("a.1"))
    for _ in range(30):
        theatre.wait(10.0)
    after = [f"{doing} {text} after it was started" for text in ("30s", "1m 00s", "2m 00s", "4m 00s")]
    assert notes(theatre) == after
    theatre._do(theatre.gang.close(theatre.now))
    assert notes(theatre) == [*after, doing]


def test_a_gang_that_trains_says_nothing_of_its_beginning() -> None:
    theatre = Theatre(slots=1)
    theatre.started()
    theatre.wait(100.0)
    theatre._do(theatre.gang.close(theatre.now))
    assert notes(theatre) == []
