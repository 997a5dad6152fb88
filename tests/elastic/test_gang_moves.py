"""A gang on several nodes: it goes where it is told, and a node that is lost is not its fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_local_gang import ACTS, act

from local_theatre import RULES, Theatre
from stretto.core.allocation import BatchChoice
from stretto.core.events import JobFailed, JobReported, JobRetried
from stretto.core.instructions import Action
from stretto.substrate.elastic.crew import Phase
from stretto.wire.messages import Ack, EpochEnd, Form, Leave, Left, Park, Report

NODES = {"x": 2, "y": 2, "z": 1}
PLACES = st.fixed_dictionaries({node: st.integers(0, count) for node, count in NODES.items()}).filter(
    lambda places: any(places.values())
)
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([Action.START, Action.RESIZE]), PLACES),
        st.tuples(st.just(Action.PARK), st.just({})),
        st.tuples(st.just("lose"), st.sampled_from(sorted(NODES))),
        st.tuples(st.sampled_from(ACTS), st.integers(0, 5)),
    ),
    max_size=40,
)


def travelling() -> Theatre:
    return Theatre(nodes=NODES)


def forms(theatre: Theatre) -> list[Form]:
    return [form for _, form in theatre.sent if isinstance(form, Form)]


@given(HAPPENINGS, PLACES)
def test_a_gang_comes_to_train_where_it_was_last_sent(
    happenings: list[tuple[Action | str, int | str | dict[str, int]]], places: dict[str, int]
) -> None:
    theatre = travelling()
    for what, detail in happenings:
        if isinstance(what, Action):
            assert isinstance(detail, dict)
            theatre.tell(what, detail, BatchChoice(4))
        elif isinstance(detail, str):
            theatre.lose_node(detail)
        elif isinstance(detail, int):
            act(theatre, what, detail)
    theatre.tell(Action.RESIZE, places)
    theatre.cooperate()
    if any(isinstance(event, JobFailed) for event in theatre.events):
        assert theatre.puppets == {}
        return
    assert theatre.nodes() == {node: count for node, count in places.items() if count}
    assert len(theatre.puppets) == sum(places.values())


def test_a_group_that_moves_trains_until_the_newcomers_are_ready_and_the_others_leave() -> None:
    theatre = travelling()
    theatre.started({"x": 2})
    stays, goes = theatre.group()
    theatre.tell(Action.RESIZE, {"x": 1, "y": 1})
    theatre.place()
    assert len(forms(theatre)) == 2, "the group was disturbed before the newcomer was ready"
    theatre.get_going()
    assert theatre.group()[0] == stays
    assert (goes, Leave(1)) in theatre.sent
    theatre.cooperate()
    assert theatre.nodes() == {"x": 1, "y": 1}


def test_if_nobody_stays_the_newcomers_first_join_those_who_go() -> None:
    theatre = travelling()
    theatre.started({"x": 2})
    theatre.tell(Action.RESIZE, {"y": 1})
    theatre.cooperate()
    assert [form.world for form in forms(theatre)] == [2, 2, 3, 3, 3, 1]
    assert [form.share_state for form in forms(theatre)] == [True, True, True, True, True, False]
    assert theatre.nodes() == {"y": 1}
    assert not theatre.messages(Park), "no checkpoint is needed to move"


def test_a_group_whose_new_slots_are_taken_gives_up_its_own_first() -> None:
    theatre = travelling()
    theatre.pools["z"].ask("somebody else")
    theatre.pools["z"].grants()
    theatre.started({"x": 2})
    theatre.tell(Action.RESIZE, {"x": 1, "z": 1})
    theatre.wait(RULES.yield_s / 2)
    assert len(forms(theatre)) == 2
    theatre.wait(RULES.yield_s)
    assert forms(theatre)[-1].world == 1, "it holds on to slots that whoever it waits for may be waiting for"
    theatre.meet()
    theatre.pools["z"].give_back("somebody else")
    theatre.cooperate()
    assert theatre.nodes() == {"x": 1, "z": 1}


def test_a_group_that_must_move_as_a_whole_and_cannot_saves_and_makes_room() -> None:
    theatre = travelling()
    theatre.pools["z"].ask("somebody else")
    theatre.pools["z"].grants()
    theatre.started({"x": 1})
    theatre.tell(Action.RESIZE, {"z": 1})
    theatre.wait(RULES.yield_s + 1)
    assert theatre.messages(Park)
    theatre.obey()
    assert theatre.pools["x"].held == 0
    theatre.pools["z"].give_back("somebody else")
    theatre.cooperate()
    assert theatre.nodes() == {"z": 1}
    assert not any(isinstance(event, JobRetried) for event in theatre.events)


def test_a_lost_node_is_no_failure_and_the_job_waits_to_be_told_where_to_go_on() -> None:
    theatre = travelling()
    theatre.started({"x": 1, "y": 1})
    theatre.lose_node("y")
    theatre.cooperate()
    assert theatre.puppets == {}
    assert theatre.gang.phase is Phase.IDLE
    assert not theatre.events, theatre.events
    theatre.tell(Action.START, {"x": 2})
    theatre.cooperate()
    assert theatre.nodes() == {"x": 2}


def test_a_group_saves_if_only_newcomers_were_on_the_node_that_is_lost() -> None:
    theatre = travelling()
    theatre.started({"x": 1})
    theatre.tell(Action.RESIZE, {"x": 1, "y": 1})
    theatre.place()
    theatre.lose_node("y")
    assert theatre.messages(Park)


def test_what_the_leader_reports_while_another_takes_over_counts_and_is_acknowledged() -> None:
    theatre = travelling()
    theatre.started({"x": 1})
    (old,) = theatre.group()
    theatre.tell(Action.RESIZE, {"y": 1})
    theatre.get_going()
    assert forms(theatre)[-1].world == 1
    end = EpochEnd(epoch=1, values={"accuracy": 0.5}, epoch_s=1.0)
    theatre.say(old, Report(progress=1.0, epoch=1, steps=1, ends=(end,)))
    assert [event.epoch for event in theatre.events if isinstance(event, JobReported)] == [1]
    theatre._do(theatre.gang.acknowledge(1))
    assert (old, Ack(1)) in theatre.sent


def test_who_has_left_before_the_others_have_formed_is_not_missed() -> None:
    theatre = travelling()
    theatre.started({"x": 2})
    _, goes = theatre.group()
    theatre.tell(Action.RESIZE, {"x": 1})
    theatre.say(goes, Left("not needed"))
    theatre.die(goes, 0)
    theatre.tell(Action.RESIZE, {"y": 1})
    theatre.cooperate()
    assert theatre.nodes() == {"y": 1}
    assert not [event for event in theatre.events if isinstance(event, JobRetried | JobFailed)]
