"""What the local substrate knows of its machine: slots, rented nodes, the folder's lock."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from local_bench import job_of
from process_bench import CommandWorkers
from stretto.core.cluster import Wish
from stretto.core.errors import InputError, PolicyError
from stretto.core.events import (
    Decided,
    Event,
    JobNoted,
    JobReported,
    NodeAdded,
    NodeLaunched,
    NodeReleased,
)
from stretto.core.job import Role
from stretto.core.observations import Result
from stretto.core.resources import Resources
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.elastic.reports import Held, TrainingAccount, untold
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import RentedSlots, SlotPool, Slots, find_slots, whole_machine
from stretto.system.identity import RunLock
from stretto.wire.messages import EpochEnd, Report


@pytest.mark.parametrize(
    ("setting", "gpus", "devices"),
    [
        (None, 0, ("",) * 8),
        (None, 2, ("0", "1")),
        ("1", 2, ("1",)),
        (" 3, 1 ", 4, ("3", "1")),
        ("GPU-5ebe9", 4, ("GPU-5ebe9",)),
        ("0,-1,1", 2, ("0",)),
        ("0,9", 2, ("0",)),
        ("0,0", 2, ("0",)),
        ("", 2, ("",) * 8),
        ("-1", 2, ("",) * 8),
        ("0", 0, ("",) * 8),
    ],
)
def test_slots_are_the_gpus_that_cuda_would_show_or_else_cores(
    setting: str | None, gpus: int, devices: tuple[str, ...]
) -> None:
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    slots = find_slots(environ=environ, count_gpus=lambda: gpus, cores=8)
    assert slots.devices == devices
    assert slots.threads_each == 8 // len(devices)


@pytest.mark.parametrize(
    ("number", "gpus", "devices", "threads"),
    [
        (1, 2, ("0",), 8),
        (4, 2, ("0", "1", "0", "1"), 2),
        (3, 0, ("", "", ""), 2),
        (20, 0, ("",) * 20, 1),
    ],
)
def test_a_number_of_slots_can_be_given(
    number: int, gpus: int, devices: tuple[str, ...], threads: int
) -> None:
    slots = find_slots(number, environ={}, count_gpus=lambda: gpus, cores=8)
    assert slots == Slots(devices, threads)


def test_no_slots_is_refused() -> None:
    with pytest.raises(InputError, match="0 slots cannot hold a worker"):
        find_slots(0)


def test_slots_are_given_out_in_the_order_they_were_asked_for() -> None:
    pool = SlotPool(Slots(("", "")))
    for worker in ("a", "b", "c", "d"):
        pool.ask(worker)
    assert pool.grants() == [("a", 0), ("b", 1)]
    assert pool.withdraw("c")
    assert not pool.withdraw("a")
    assert pool.grants() == []
    pool.give_back("b")
    assert pool.grants() == [("d", 1)]
    assert pool.held == 2


def test_wishes_are_granted_at_once_as_far_as_slots_go() -> None:
    rented = RentedSlots(2)
    events = rented.provision(Wish((("slot", 3),)), 5.0)
    assert [(event.kind, event.subject, event.t_s) for event in events] == [
        ("node-launched", "slot-1", 5.0),
        ("node-added", "slot-1", 5.0),
        ("node-launched", "slot-2", 5.0),
        ("node-added", "slot-2", 5.0),
    ]
    assert rented.provision(Wish((("slot", 3),)), 6.0) == []
    assert rented.provision(Wish((("slot", 1),), release=("slot-1",)), 7.0) == [
        NodeReleased(t_s=7.0, node_id="slot-1")
    ]
    with pytest.raises(PolicyError, match=r"p3\.8xlarge"):
        rented.provision(Wish((("p3.8xlarge", 1),)), 8.0)


def test_nodes_are_remembered_from_the_history() -> None:
    first = RentedSlots(3)
    history: list[Event] = first.provision(Wish((("slot", 2),)), 1.0)
    history += first.provision(Wish((("slot", 1),), release=("slot-2",)), 2.0)
    again = RentedSlots(3)
    assert again.recall(history, 3.0) == []
    assert again.provision(Wish((("slot", 1),)), 3.0) == []
    launched, added = again.provision(Wish((("slot", 2),)), 4.0)
    assert isinstance(launched, NodeLaunched)
    assert isinstance(added, NodeAdded)
    assert added.node.id == "slot-3", "names are not given twice"


def wished(*, slots: int, release: tuple[str, ...] = ()) -> Decided:
    wish = Wish((("slot", slots),), release)
    return Decided(t_s=0.0, policy="p", instructions=(), reasons={}, memory=None, wish=wish)


def test_the_last_wish_comes_true_wherever_the_record_ends() -> None:
    whole: list[Event] = [wished(slots=2), *RentedSlots(3).provision(Wish((("slot", 2),)), 0.0)]
    for known in range(1, len(whole) + 1):
        new = RentedSlots(3).recall(whole[:known], 0.0)
        assert sorted([*whole[1:known], *new], key=str) == sorted(whole[1:], key=str)


def test_a_node_that_was_to_be_given_back_is() -> None:
    first = RentedSlots(3)
    history = [wished(slots=2), *first.provision(Wish((("slot", 2),)), 0.0)]
    history.append(wished(slots=1, release=("slot-1",)))
    assert RentedSlots(3).recall(history, 5.0) == [NodeReleased(t_s=5.0, node_id="slot-1")]


def test_commands_get_the_nodes_that_were_wished_for_too(tmp_path: Path) -> None:
    substrate = CommandWorkers({}, tmp_path, slots=Slots(("", "")), clock=lambda: 1.0, rules=Rules())
    try:
        substrate.recover([wished(slots=1)])
        kinds = [event.kind for _ in range(2) if (event := substrate.next_event(2.0)) is not None]
    finally:
        substrate.close()
    assert kinds == ["node-launched", "node-added"]


def test_the_machine_is_one_node_of_all_slots() -> None:
    assert whole_machine(3).capacity == Resources(gpu=3)


def test_a_lock_is_held_by_whoever_inherited_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run" / "lock", patience_s=0.0)
    keeper = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fd,), text=True
    )
    lock.release()
    with pytest.raises(InputError, match=f"in use by process {keeper.pid}"):
        RunLock(tmp_path / "run" / "lock", patience_s=0.1)
    keeper.communicate("\n")
    free = RunLock(tmp_path / "run" / "lock", patience_s=10.0)
    os.fstat(free.fd)
    free.release()


def test_jobs_that_cannot_run_here_are_refused(tmp_path: Path) -> None:
    substrate = LocalSubstrate(
        spec_of=lambda job: pytest.fail(job.id), run_dir=tmp_path, slots=Slots(("",)), clock=lambda: 0.0
    )
    pair = Role(demand=Resources(gpu=1), requested=2, min=2, max=2)
    try:
        for job_id in ("..", "a/b"):
            with pytest.raises(InputError, match="cannot name a folder"):
                substrate.admit(job_of(job_id))
        with pytest.raises(InputError, match="needs 2 workers at least, and there are 1 slots"):
            substrate.admit(replace(job_of("a"), worker=pair))
        with pytest.raises(InputError, match="parameter servers"):
            substrate.admit(replace(job_of("a"), server=pair))
    finally:
        substrate.close()


def test_epochs_that_nobody_lived_to_tell_of_are_in_the_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert untold(metrics, 0, nodes=1) == []
    lines = [
        {"epoch": e, "workers": 2, "batch": 8, "accuracy": a} for e, a in ((1, 0.1), (2, 0.2), (3, None))
    ]
    lines.append({"epoch": 2, "workers": 1, "batch": 8, "accuracy": 0.25})
    metrics.write_text("\n".join(map(json.dumps, lines)) + '\n[1]\n{"epoch": 4, "accu')
    two, three = untold(metrics, 1, nodes=2)
    assert two.report.ends == (EpochEnd(epoch=2, values={"accuracy": 0.25}, epoch_s=None),)
    account = TrainingAccount(job_of("a"), "accuracy", epoch=1, held=[two, three])
    account.held.append(Held(Report(progress=3.5, epoch=3, steps=1), workers=4, nodes=1))
    events = [event for event in account.tell(t_s=9.0, resize_s=2.0) if isinstance(event, JobReported)]
    assert [r for event in events for r in event.results] == [
        Result(2, 0.25, None, workers=1, nodes=1),
        Result(3, None, None, workers=2, nodes=2),
    ]
    assert [event.work_done for event in events] == [20.0, 30.0, 35.0]
    assert [event.resize_s for event in events] == [None, None, 2.0]


def test_the_last_epochs_of_a_job_that_is_done_are_told_whoever_wrote_them_down(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"epoch": e, "workers": 1, "batch": 8, "accuracy": e / 10} for e in (1, 2, 3, 4)]
    metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    account = TrainingAccount(job_of("a"), "accuracy", epoch=1, written=partial(untold, metrics))
    end = EpochEnd(epoch=2, values={"accuracy": 0.2}, epoch_s=3.0)
    account.held.append(Held(Report(progress=2.0, epoch=2, steps=1, ends=(end,)), workers=1, nodes=1))
    account.make_up(nodes=1)
    events = [event for event in account.tell(t_s=9.0) if isinstance(event, JobReported)]
    told = [(r.epoch, r.value, r.epoch_s) for event in events for r in event.results]
    assert told == [(2, 0.2, 3.0), (3, 0.3, None), (4, 0.4, None)]
    account.make_up(nodes=1)
    assert account.tell(t_s=9.0) == []


def test_an_epoch_without_the_metric_has_no_result_and_that_is_noted_once() -> None:
    account = TrainingAccount(job_of("a"), "accuracy")
    values: list[dict[str, float]] = [
        {"acc": 0.5, "loss": 1.0},
        {},
        {"accuracy": math.nan},
        {"accuracy": 0.7},
    ]
    for epoch, reported in enumerate(values, start=1):
        end = EpochEnd(epoch=epoch, values=reported, epoch_s=1.0)
        account.held.append(Held(Report(progress=epoch, epoch=epoch, steps=1, ends=(end,)), 1, 1))
    events = account.tell(t_s=9.0)
    results = [r for event in events if isinstance(event, JobReported) for r in event.results]
    assert [(result.epoch, result.value) for result in results] == [(3, None), (4, 0.7)]
    (note,) = [event.text for event in events if isinstance(event, JobNoted)]
    assert "epoch 1 has no result" in note
    assert "compares accuracy" in note
    assert "acc, loss was reported" in note
