"""A gang that runs a command, without processes: whatever happens, nothing new meets something old."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_gang_moves import HAPPENINGS as TRAVELS
from test_gang_moves import NODES, PLACES
from test_local_gang import ACTS, HAPPENINGS, RETRIES, act, play

from local_bench import job_of
from local_theatre import RULES, Theatre
from stretto.core.events import JobFailed, JobFinished, JobReported, JobRetried
from stretto.core.instructions import Action
from stretto.core.job import Work
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.command_gang import CommandGang, PrintedAccount
from stretto.substrate.elastic.crew import Phase
from stretto.substrate.elastic.effects import Effect, Spawn, TrainingJob
from stretto.substrate.elastic.losses import Losses
from stretto.substrate.elastic.recovery import Failures
from stretto.wire.messages import Failed, Finished, Form, Leave, Left, LetEnd, Park, Printed, SetBatch


class Troupe(Theatre):
    """Plays workers that run a command, and checks that all of them are of one start."""

    def __init__(
        self, slots: int = 3, *, retries: int = 2, nodes: Mapping[str, int] | None = None, epochs: int = 1000
    ) -> None:
        super().__init__(slots, nodes=nodes)
        job = replace(job_of("a"), work=Work(units_per_epoch=1.0, epochs=epochs))
        command = Command(("train", "{workers}"), metric="accuracy")
        self.gang: CommandGang = CommandGang(
            job,
            TrainingJob(entry="train", config={}, epochs=epochs, metric="accuracy", command=command),
            command,
            RULES,
            "log",
            account=PrintedAccount(job, "accuracy"),
            losses=Losses(retries, Failures()),
            places_of=lambda allocation: (
                Counter(dict(allocation.workers)) if nodes else Counter({"": allocation.worker_count})
            ),
            starts=0,
        )
        self.start_of: dict[str, int] = {}

    def report(self, epoch: int | None = None) -> None:
        self.epoch = self.epoch + 1 if epoch is None else epoch
        for worker_id in self.group()[:1]:
            self.say(worker_id, Printed(json.dumps({"epoch": self.epoch, "accuracy": 0.5})))

    def ended(self) -> list[str]:
        return [event.kind for event in self.events if isinstance(event, JobFailed | JobFinished)]

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Spawn):
            restarts = self.gang.command.restarts
            self.start_of[effect.worker_id] = restarts
            assert {self.start_of[worker_id] for worker_id in self.puppets} <= {restarts}
        super()._carry_out(effect)


@given(HAPPENINGS, RETRIES, st.sampled_from([Action.PARK, Action.STOP]), st.sampled_from([3, 1000]))
def test_parked_or_stopped_it_holds_nothing_whatever_happened(
    happenings: list[tuple[Action | str, int]], retries: int, end: Action, epochs: int
) -> None:
    troupe = Troupe(retries=retries, epochs=epochs)
    play(troupe, happenings)
    troupe.tell(end)
    troupe.cooperate()
    assert troupe.puppets == {}
    assert not troupe.gang.busy
    assert len(troupe.ended()) <= 1


@given(HAPPENINGS, RETRIES, st.integers(1, 3))
def test_it_comes_to_run_with_what_it_was_last_given(
    happenings: list[tuple[Action | str, int]], retries: int, workers: int
) -> None:
    troupe = Troupe(retries=retries)
    play(troupe, happenings)
    troupe.tell(Action.RESIZE, workers)
    troupe.cooperate()
    if troupe.ended():
        assert troupe.puppets == {}
        return
    assert len(troupe.group()) == len(troupe.puppets) == workers
    assert troupe.gang.command.argv == ("train", str(workers))
    assert not troupe.messages(Leave)
    assert not troupe.messages(SetBatch)


@given(TRAVELS, PLACES)
def test_it_comes_to_run_where_it_was_last_sent(
    happenings: list[tuple[Action | str, int | str | dict[str, int]]], places: dict[str, int]
) -> None:
    troupe = Troupe(nodes=NODES)
    for what, detail in happenings:
        if isinstance(what, Action):
            assert isinstance(detail, dict)
            troupe.tell(what, detail)
        elif isinstance(detail, str):
            troupe.lose_node(detail)
        elif isinstance(detail, int):
            act(troupe, what, detail)
    troupe.tell(Action.RESIZE, places)
    troupe.cooperate()
    if troupe.ended():
        assert troupe.puppets == {}
        return
    assert troupe.nodes() == {node: count for node, count in places.items() if count}
    ranks = [troupe.puppets[worker_id].node for worker_id in troupe.group()]
    assert ranks == sorted(ranks, key=list(places).index), "ranks of a node follow each other"
    for worker_id in troupe.group():
        form = troupe.puppets[worker_id].form
        assert form is not None
        assert len(form.neighbours) == places[troupe.puppets[worker_id].node]
        assert f"store of {worker_id}" in form.neighbours


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 5)), max_size=30))
def test_epochs_are_told_once_and_in_order(happenings: list[tuple[str, int]]) -> None:
    troupe = Troupe(retries=50, epochs=8)
    troupe.started(2)
    for what, which in happenings:
        act(troupe, what, which)
    reports = [event for event in troupe.events if isinstance(event, JobReported)]
    epochs = [result.epoch for report in reports for result in report.results]
    assert epochs == sorted(set(epochs))
    assert not epochs or epochs[-1] <= 8


def test_one_that_fails_ends_all_and_is_blamed() -> None:
    troupe = Troupe()
    troupe.started(3)
    first, second, third = troupe.group()
    troupe.say(second, Failed("exit code 3 of rank 1; its log ends:\nso"))
    troupe.die(second, 1)
    assert [troupe.puppets[one].dying for one in (first, third)] == [True, True]
    troupe.say(first, Failed("exit code 143"))
    troupe.cooperate()
    (retried,) = [event for event in troupe.events if isinstance(event, JobRetried)]
    assert (retried.error, retried.log) == ("exit code 3 of rank 1; its log ends:\nso", "log")
    assert len(troupe.group()) == 3


def test_everybody_is_told_to_stop() -> None:
    troupe = Troupe()
    troupe.started(3)
    group = set(troupe.group())
    troupe.tell(Action.PARK)
    assert {worker_id for worker_id, message in troupe.sent if isinstance(message, Park)} == group


def test_a_trial_that_has_shown_all_may_end_by_itself_and_then_must() -> None:
    troupe = Troupe(epochs=2)
    troupe.started(2)
    group = troupe.group()
    troupe.report()
    troupe.report()
    assert {worker_id for worker_id, message in troupe.sent if isinstance(message, LetEnd)} == set(group)
    assert troupe.ended() == [], "not before nothing of it is left"
    troupe.say(group[0], Finished(leaves=True))
    troupe.die(group[0], 0)
    troupe.wait(RULES.command_s + RULES.grace_s + 1.0)
    assert troupe.puppets[group[1]].dying
    troupe.bury()
    assert troupe.ended() == ["job-finished"]


def test_one_that_is_done_can_be_hastened() -> None:
    for end in (Action.PARK, Action.STOP, "close"):
        troupe = Troupe(epochs=1)
        troupe.started(1)
        (only,) = troupe.group()
        troupe.report()
        assert not troupe.puppets[only].dying
        if isinstance(end, Action):
            troupe.tell(end)
        else:
            troupe._do(troupe.gang.close(troupe.now))
        assert troupe.puppets[only].dying
        troupe.bury()
        assert troupe.ended() == ([] if end is Action.STOP else ["job-finished"])


def test_an_epoch_is_finished_with_the_next_result() -> None:
    troupe = Troupe()
    troupe.started(2)
    troupe._do(troupe.gang.finish_epoch(troupe.now))
    troupe.wait(1.0)
    assert not troupe.messages(Park)
    assert not troupe.messages(LetEnd)
    troupe.report()
    assert len(troupe.messages(Park)) == 2
    troupe.cooperate()
    assert troupe.gang.phase is Phase.IDLE
    assert not troupe.gang.busy


def test_a_start_lasts_until_the_first_report() -> None:
    troupe = Troupe()
    troupe.started(1)
    begun_s = troupe.now.t_s
    troupe.wait(3.0)
    troupe.report()
    troupe.tell(Action.RESIZE, 2)
    asked_s = troupe.now.t_s
    troupe.cooperate()
    troupe.report()
    first, second = [event.resize_s for event in troupe.events if isinstance(event, JobReported)]
    assert first == begun_s + 3.0
    assert second == troupe.now.t_s - asked_s
    assert len(troupe.messages(Form)) == 3


def test_what_comes_while_it_leaves_counts_when_it_goes_on() -> None:
    troupe = Troupe()
    troupe.started(1)
    troupe.tell(Action.PARK)
    troupe.report()
    assert not [event for event in troupe.events if isinstance(event, JobReported)]
    for worker_id in troupe.group():
        troupe.say(worker_id, Left("stopped", leaves=True))
        troupe.die(worker_id, 0)
    troupe.tell(Action.START, 1)
    assert [event.epoch for event in troupe.events if isinstance(event, JobReported)] == [1]


def test_what_an_earlier_start_has_shown_is_not_the_present_one_s_doing() -> None:
    troupe = Troupe(epochs=3)
    troupe.started(1)
    assert not troupe.gang.command.tells_missed
    troupe.tell(Action.RESIZE, 2)
    troupe.cooperate()
    assert troupe.gang.command.tells_missed
    first = troupe.group()[0]
    for line in ({"epoch": 2, "accuracy": 0.5}, {"epoch": 1, "accuracy": 0.5}, {"accuracy": 0.5}):
        troupe.say(first, Printed(json.dumps(line), missed=True))
    troupe.report(3)
    reports = [event for event in troupe.events if isinstance(event, JobReported)]
    assert [(event.epoch, event.resize_s is None) for event in reports] == [(2, True), (3, False)]
