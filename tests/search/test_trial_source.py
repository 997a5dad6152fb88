"""The trials of a study as jobs, driven by the controller in a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from stretto.control.controller import Controller, Settings
from stretto.core.allocation import NOTHING, BatchChoice, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.errors import JournalError
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobReported, JobSubmitted
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job, Tier
from stretto.core.observations import Result
from stretto.journal.base import MemoryJournal
from stretto.journal.codec import decode, encode
from stretto.policies.base import ClusterView, Memory
from stretto.policies.trials import TUNING_EVENTS
from stretto.search.samplers import ListedSampler, RandomSampler, Sampler, make_sampler
from stretto.search.source import TrialSource, trials_ahead
from stretto.search.space import Config, FloatDimension, Space
from stretto.search.study import Direction, Study
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from tuning_world import CurveTruth

SPACE = Space((FloatDimension("lr", 0.0, 1.0),))
STUDY = Study(name="s", metric="m", direction=Direction.MAX, trials=7, rungs=(1,), eta=2, max_epochs=3)


@dataclass(frozen=True, kw_only=True)
class Halves:
    """One GPU a trial; whoever is below a half at its first epoch stops, a diverged one too."""

    name: str = "halves"
    interval_s: float = 1000.0
    wakes_on: frozenset[str] = TUNING_EVENTS
    enough: int = 99
    """With so many results in sight, trials that never started are stopped."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        assert rng is not None
        seen = (memory or 0) + len([job for job in view.jobs if job.results])
        stops = {job.id for job in view.jobs if job.results and (job.results[-1].value or 0.0) < 0.5}
        if seen >= self.enough:
            stops |= {job.id for job in view.jobs if not job.allocation}
        staying = {job.id: job.allocation for job in view.jobs if job.allocation and job.id not in stops}
        free = view.total_gpus - len(staying)
        new = [job.id for job in view.jobs if not job.allocation and job.id not in stops][:free]
        used = {node for allocation in staying.values() for node in allocation.nodes}
        nodes = [node.id for node in view.nodes if node.id not in used]
        placed = {**staying, **{trial: on_nodes({node: 1}) for trial, node in zip(new, nodes, strict=False)}}
        decision = Decision(
            allocations=placed,
            batches=dict.fromkeys(placed, BatchChoice(1024)),
            reasons={job.id: Reason(ReasonCode.WAITS, "as the test says") for job in view.jobs},
            stops=frozenset(stops),
        )
        return decision, seen


class Recorder(RandomSampler):
    """A random sampler that shows what it was told."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(SPACE, seed)
        self.told: list[tuple[int, int, float | None, bool]] = []

    def tell(self, number: int, config: Config, epoch: int, value: float | None, *, final: bool) -> None:
        assert config == self.ask(number)
        self.told.append((number, epoch, value, final))


def truth_of(job: Job) -> CurveTruth:
    """A trial is as good as its learning rate; one in some diverges, and each has its own speed."""
    lr = float(dict(job.config)["lr"])
    value = None if 0.4 < lr < 0.45 else lr
    return CurveTruth(curve=[value], epochs=STUDY.max_epochs, epoch_s=10.0 + lr)


def drive(
    sampler: Sampler,
    *,
    study: Study = STUDY,
    ahead: int = 2,
    gpus: int = 3,
    history: Iterable[Event] = (),
    policy: Halves | None = None,
    until_s: float = math.inf,
) -> list[Event]:
    journal = MemoryJournal()
    journal.append(list(history))
    Controller(
        policy=policy or Halves(),
        substrate=SimSubstrate(truth_of, physics=Physics(restart_s=5.0)),
        journal=journal,
        nodes=gpu_nodes(gpus, 1),
        arrivals=TrialSource(study, sampler, most_gpus=4, ahead=ahead),
        settings=Settings(until_s=until_s),
    ).run()
    return list(journal.events())


def submitted(events: Iterable[Event]) -> list[Job]:
    return [event.job for event in events if isinstance(event, JobSubmitted)]


def over(events: Iterable[Event]) -> set[str]:
    finished = {event.job_id for event in events if isinstance(event, JobFinished)}
    return finished | {
        one.job_id
        for event in events
        if isinstance(event, Decided)
        for one in event.instructions
        if one.action is Action.STOP
    }


class TestDriven:
    def test_all_trials_are_drawn_in_order_and_ended(self) -> None:
        events = drive(RandomSampler(SPACE, 0))
        jobs = submitted(events)
        assert [job.id for job in jobs] == [f"trial-{number:03d}" for number in range(7)]
        assert over(events) == {job.id for job in jobs}
        assert [job.config for job in jobs] == [RandomSampler(SPACE, 0).ask(number) for number in range(7)]

    def test_a_trial_is_a_job_of_its_study(self) -> None:
        job = submitted(drive(RandomSampler(SPACE, 0)))[0]
        assert (job.study, job.application, job.tier) == ("s", "s", Tier.ELASTIC)
        assert (job.worker.min, job.worker.max, job.worker.demand.gpu) == (1, 4, 1)
        assert (job.work.units_per_epoch, job.work.epochs) == (1.0, 3)

    @pytest.mark.parametrize("ahead", [1, 2, 5])
    def test_never_more_wait_than_ahead_and_gpus_do_not_lie_idle(self, ahead: int) -> None:
        events = drive(RandomSampler(SPACE, 0), ahead=ahead)
        waiting: set[str] = set()
        most = 0
        for event in events:
            if isinstance(event, JobSubmitted):
                waiting.add(event.job.id)
            elif isinstance(event, Decided):
                waiting -= {one.job_id for one in event.instructions if one.action is Action.START}
            most = max(most, len(waiting))
        assert most == ahead
        starts_s = [
            e.t_s for e in events if isinstance(e, Decided) for i in e.instructions if i.action == "start"
        ]
        assert starts_s[:3] == [0.0, 0.0, 0.0]

    def test_submission_is_when_it_was_handed_out(self) -> None:
        events = drive(RandomSampler(SPACE, 0), ahead=1)
        assert all(event.t_s == event.job.submit_s for event in events if isinstance(event, JobSubmitted))
        assert submitted(events)[-1].submit_s > 0.0

    def test_stopped_before_it_started_means_no_more(self) -> None:
        events = drive(RandomSampler(SPACE, 0), policy=Halves(enough=2))
        jobs = submitted(events)
        assert 3 <= len(jobs) < 7
        assert over(events) == {job.id for job in jobs}

    def test_a_list_ends_where_it_ends(self) -> None:
        rows: list[Config] = [(("lr", number / 4),) for number in range(4)]
        jobs = submitted(drive(ListedSampler(rows, 0)))
        assert sorted(job.config for job in jobs) == rows

    def test_the_sampler_is_told_everything_once(self) -> None:
        sampler = Recorder()
        events = drive(sampler)
        results = [
            (int(event.job_id[-3:]), one.epoch, one.value, False)
            for event in events
            if isinstance(event, JobReported)
            for one in event.results
        ]
        assert [told for told in sampler.told if not told[3]] == results
        finals = [told for told in sampler.told if told[3]]
        assert sorted(number for number, *_ in finals) == list(range(7))
        assert {told[:3] for told in finals} <= {told[:3] for told in results}


class TestResume:
    @pytest.mark.parametrize(
        ("name", "ahead", "enough"), [("random", 2, 99), ("random", 3, 4), ("tpe", 1, 99), ("qmc", 2, 99)]
    )
    def test_a_study_cut_anywhere_is_the_same_study_when_resumed(
        self, name: str, ahead: int, enough: int
    ) -> None:
        if name != "random":
            pytest.importorskip("optuna")
        study = replace(STUDY, trials=14) if name == "tpe" else STUDY
        policy = Halves(enough=enough)
        step = 1 if name == "random" else 7

        def again(history: list[Event]) -> list[Event]:
            sampler = make_sampler(name, SPACE, study, seed=3)
            return drive(sampler, study=study, ahead=ahead, history=history, policy=policy)

        whole = again([])
        assert over(whole) == {job.id for job in submitted(whole)}
        for cut in range(0, len(whole) + 1, step):
            assert again(whole[:cut]) == whole, f"cut after {cut} events"

    def test_a_journal_from_disk_does_as_well(self) -> None:
        whole = drive(RandomSampler(SPACE, 3))
        read_back = [decode(event.kind, encode(event)) for event in whole[:25]]
        assert drive(RandomSampler(SPACE, 3), history=read_back) == whole

    def test_another_study_is_refused_with_the_difference(self) -> None:
        history = drive(RandomSampler(SPACE, 3), until_s=30.0)
        with pytest.raises(JournalError, match="trial-000 had config"):
            drive(RandomSampler(SPACE, 4), history=history)
        with pytest.raises(JournalError, match="had work"):
            drive(RandomSampler(SPACE, 3), study=replace(STUDY, max_epochs=4), history=history)
        with pytest.raises(JournalError, match="no more than 2 trials"):
            drive(RandomSampler(SPACE, 3), study=replace(STUDY, trials=2), history=history)


def decided(t_s: float, *told: tuple[Action, str]) -> Decided:
    instructions = tuple(
        Instruction(number, action, trial, NOTHING, BatchChoice(0))
        for number, (action, trial) in enumerate(told, start=1)
    )
    return Decided(t_s=t_s, policy="p", instructions=instructions, reasons={}, memory=None)


class TestByHand:
    def test_when_it_wants_to_submit(self) -> None:
        source = TrialSource(STUDY, Recorder(), most_gpus=1, ahead=2)
        assert (source.next_s(), source.to_come) == (0.0, 7)
        assert [job.id for job in source.due(0.0)] == ["trial-000", "trial-001"]
        assert (source.next_s(), source.to_come) == (math.inf, 5)
        assert source.due(0.0) == []
        source.observe(decided(4.0, (Action.START, "trial-001")))
        assert source.next_s() == 4.0
        assert [job.submit_s for job in source.due(4.5)] == [4.5]

    def test_paused_and_started_again_is_no_news(self) -> None:
        source = TrialSource(STUDY, Recorder(), most_gpus=1, ahead=1)
        source.due(0.0)
        source.observe(decided(1.0, (Action.START, "trial-000")))
        source.due(1.0)
        source.observe(decided(2.0, (Action.PARK, "trial-000")))
        source.observe(decided(3.0, (Action.START, "trial-000")))
        assert source.next_s() == math.inf

    def test_a_failed_trial_is_told_as_worthless_and_replaced(self) -> None:
        sampler = Recorder()
        source = TrialSource(STUDY, sampler, most_gpus=1, ahead=1)
        source.due(0.0)
        source.observe(JobFailed(t_s=1.0, job_id="trial-000", error="no"))
        assert sampler.told == [(0, 0, None, True)]
        assert [job.id for job in source.due(1.0)] == ["trial-001"]

    def test_a_report_on_its_way_when_the_trial_was_stopped_is_passed_over(self) -> None:
        sampler = Recorder()
        source = TrialSource(STUDY, sampler, most_gpus=1, ahead=1)
        source.due(0.0)
        source.observe(decided(0.0, (Action.START, "trial-000")))
        result = Result(epoch=1, value=0.5, epoch_s=None, workers=1, nodes=1)
        report = JobReported(t_s=9.0, job_id="trial-000", work_done=1.0, epoch=1, results=(result,))
        source.observe(report)
        source.observe(decided(9.0, (Action.STOP, "trial-000")))
        source.observe(report)
        assert sampler.told == [(0, 1, 0.5, False), (0, 1, 0.5, True)]
        assert source.to_come == 6

    def test_jobs_of_others_are_none_of_its_business(self) -> None:
        source = TrialSource(STUDY, Recorder(), most_gpus=1, ahead=1)
        [job] = source.due(0.0)
        source.observe(JobSubmitted(t_s=1.0, job=replace(job, id="other", study="another")))
        source.observe(JobFinished(t_s=1.0, job_id="other"))
        assert source.to_come == 6

    def test_how_many_ahead(self) -> None:
        assert trials_ahead(STUDY, RandomSampler(SPACE, 0), 4) == 4
        assert trials_ahead(STUDY, RandomSampler(SPACE, 0), 64) == 7
        pytest.importorskip("optuna")
        assert trials_ahead(STUDY, make_sampler("tpe", SPACE, STUDY, 0), 64) == 1
