"""Asking training code what it wants: how many at once, who is asked once for several, what is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed, JobFinished
from stretto.core.instructions import Instruction
from stretto.inputs.jobs import BatchSpec, JobSpec
from stretto.inputs.work import Entry
from stretto.launch.describe import described_by
from stretto.profiling.probe_data import SlotMap
from stretto.substrate.local.slots import whole_machine
from stretto.wire.messages import Described

SAYS = Described(
    examples=100, batch=8, adaptive=False, max_batch=8, per_worker_min=1, per_worker_max=8, accumulation=False
)


def spec(name: str, lr: float) -> JobSpec:
    return JobSpec(
        name=name,
        work=Entry(Path("/train.py"), "train"),
        epochs=1,
        min_workers=1,
        max_workers=None,
        batch=BatchSpec(),
        tier=None,
        submit_s=0.0,
        config=(("lr", lr),),
    )


class Trainings:
    """Each takes so long to come to its first batch; None: it never does. `ends` are events of some."""

    def __init__(self, takes_s: dict[str, float | None], ends: Sequence[Event] = ()) -> None:
        self._takes_s = takes_s
        self._ends = list(ends)
        self._now_s = 0.0
        self._began_s: dict[str, float] = {}
        self.most_at_once = 0

    def now_s(self) -> float:
        return self._now_s

    def admit(self, job: object) -> None:
        del job

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            self._began_s[one.job_id] = self._now_s
        waiting = [job_id for job_id in self._began_s if self.described(job_id) is None]
        self.most_at_once = max(self.most_at_once, len(waiting))

    def next_event(self, until_s: float) -> Event | None:
        if self._ends:
            return self._ends.pop(0)
        self._now_s = until_s
        return None

    def described(self, job_id: str) -> Described | None:
        takes_s = self._takes_s[job_id]
        over = takes_s is not None and self._now_s - self._began_s[job_id] >= takes_s
        return SAYS if over else None

    def is_born(self, job_id: str) -> bool:
        return self._now_s - self._began_s[job_id] > 15.0


def ask(
    trainings: Trainings, jobs: Sequence[JobSpec], slots: int = 2
) -> tuple[dict[str, Described], list[str]]:
    said: list[str] = []
    slot_map = SlotMap([whole_machine(slots)])
    return described_by(trainings, jobs, slot_map, slots=slots, tell=said.append), said  # type: ignore[arg-type]


def test_jobs_are_asked_as_many_at_once_as_there_are_slots_and_equal_ones_once() -> None:
    jobs = [spec("a", 0.1), spec("b", 0.1), spec("c", 0.2), spec("d", 0.3), spec("e", 0.2)]
    trainings = Trainings({"a": 3.0, "c": 2.0, "d": 1.0})
    found, said = ask(trainings, jobs)
    assert list(found) == ["a", "b", "c", "d", "e"]
    assert set(found.values()) == {SAYS}
    assert said == [
        f"looking at job {number} of 5: {name}" for number, name in ((1, "a"), (3, "c"), (4, "d"))
    ]
    assert trainings.most_at_once == 2


def test_who_is_waited_for_is_said_and_nobody_forever() -> None:
    trainings = Trainings({"a": None})
    with pytest.raises(InputError, match="after 5m 00s: the training function has taken no batch"):
        ask(trainings, [spec("a", 0.1)])
    assert trainings.now_s() == pytest.approx(300.0, abs=1.0)
    _, said = ask(Trainings({"a": 25.0}), [spec("a", 0.1)])
    assert said[1:] == [
        "job a: the training code is being imported, after 10s",
        "job a: the training function has taken no batch, after 20s",
    ]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (
            JobFinished(t_s=0.1, job_id="a"),
            "ended without a batch of a loader. Give the loader to run.prepare",
        ),
        (JobFailed(t_s=0.1, job_id="a", error="no data"), "the training code failed. no data"),
    ],
)
def test_training_that_ends_before_its_first_batch_is_told_at_once(end: Event, why: str) -> None:
    trainings = Trainings({"a": None}, [end])
    with pytest.raises(InputError, match=f"job a: .*{why}"):
        ask(trainings, [spec("a", 0.1)])
    assert trainings.now_s() < 1.0
