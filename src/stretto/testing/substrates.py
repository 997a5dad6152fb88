"""Conformance tests for substrates, to inherit.

    class TestMine(SubstrateConformance):
        def open(self, sketches, folder):
            return SubstrateCase(substrate=..., jobs=..., ...)

Times are those of the substrate's clock, so the same tests serve simulated and real time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Wish
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobSubmitted,
    NodeAdded,
    NodeLaunched,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.substrate import Substrate


@dataclass(frozen=True, slots=True)
class Sketch:
    """A job that the tests need."""

    id: str
    fails: bool = False
    """It fails before it is done. Raise unittest.SkipTest if no job can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubstrateCase:
    """A new substrate, and what the tests need to know about it."""

    substrate: Substrate
    jobs: Mapping[str, Job]
    """One job per sketch, with five epochs or more and a report for each; none is admitted yet."""
    small: Allocation
    """All jobs can have this at the same time."""
    large: Allocation
    """More workers than `small`; one job can have it while the others have nothing."""
    batch: BatchChoice
    other_batch: BatchChoice
    tick_s: float
    """A running job reports within this time, and runs for at least as long after its first report."""
    patience_s: float
    """Every job ends within this time."""
    lost_units: float = 0.0
    """Reported work that a stop may cost: that between two checkpoints."""
    wish: Wish | None = None
    """Nodes that can be requested, and come within `patience_s`; None if there are none."""


class _Drive:
    """Stands in for the controller: numbers instructions, keeps the history, checks every event."""

    def __init__(self, stage: SubstrateCase, history: Sequence[Event] = ()) -> None:
        self.stage = stage
        self.substrate = stage.substrate
        self.history: list[Event] = list(history)
        self.instructions = [
            instruction
            for event in history
            if isinstance(event, Decided)
            for instruction in event.instructions
        ]
        self._last_s = max((event.t_s for event in history), default=0.0)

    def admit(self, *job_ids: str) -> None:
        for job_id in job_ids:
            job = self.stage.jobs[job_id]
            self.substrate.admit(job)
            self.history.append(JobSubmitted(t_s=job.submit_s, job=job))

    def tell(
        self, action: Action, job_id: str, allocation: Allocation, batch: BatchChoice | None = None
    ) -> None:
        number = len(self.instructions) + 1
        instruction = Instruction(number, action, job_id, allocation, batch or self.stage.batch)
        self.instructions.append(instruction)
        self._decide(instruction)
        self.substrate.apply([instruction])

    def record_wish(self) -> Wish:
        """Records a decision with a request for nodes that is not carried out yet."""
        if self.stage.wish is None:
            raise SkipTest("no nodes can be requested here")
        self._decide(wish=self.stage.wish)
        return self.stage.wish

    def _decide(self, *instructions: Instruction, wish: Wish | None = None) -> None:
        decided = Decided(
            t_s=self.substrate.now_s(),
            policy="conformance",
            instructions=instructions,
            reasons={},
            memory=None,
            wish=wish,
        )
        self.history.append(decided)

    def start(self, *job_ids: str) -> None:
        for job_id in job_ids:
            self.tell(Action.START, job_id, self.stage.small)

    def next(self, until_s: float) -> Event | None:
        event = self.substrate.next_event(until_s)
        now_s = self.substrate.now_s()
        if event is None:
            assert now_s >= until_s, f"no event before {until_s} s, and yet it is only {now_s} s"
            return None
        assert event.t_s <= until_s, f"{event} comes after {until_s} s, until when it was asked for"
        assert event.t_s >= self._last_s, f"{event} comes after one of {self._last_s} s"
        assert event.t_s <= now_s, f"{event} lies in the future of {now_s} s"
        self._last_s = event.t_s
        self.history.append(event)
        return event

    def watch(self, for_s: float) -> list[Event]:
        """All events in this time."""
        until_s = self.substrate.now_s() + for_s
        seen = []
        while (event := self.next(until_s)) is not None:
            seen.append(event)
        return seen

    def watch_acts(self) -> list[Event]:
        """What jobs did in a time in which a running job reports."""
        seen = self.watch(2 * self.stage.tick_s)
        return [event for event in seen if isinstance(event, JobReported) or _is_end(event)]

    def wait_for(self, wanted: Callable[[Event], bool], what: str) -> list[Event]:
        """All events up to the first that matches."""
        until_s = self.substrate.now_s() + self.stage.patience_s
        seen = []
        while (event := self.next(until_s)) is not None:
            seen.append(event)
            if wanted(event):
                return seen
        raise AssertionError(f"no {what} in {self.stage.patience_s} s; there was {seen}")

    def wait_for_node(self, kind: type[NodeLaunched | NodeAdded]) -> None:
        self.wait_for(lambda event: isinstance(event, kind), kind.__name__)

    def nodes(self, kind: type[NodeLaunched | NodeAdded]) -> list[str]:
        return sorted(event.subject for event in self.history if isinstance(event, kind))

    def wait_for_report(self, job_id: str, *, epoch: int = 1) -> JobReported:
        def wanted(event: Event) -> bool:
            return isinstance(event, JobReported) and event.job_id == job_id and event.epoch >= epoch

        event = self.wait_for(wanted, f"report of {job_id} at epoch {epoch}")[-1]
        assert isinstance(event, JobReported)
        return event

    def wait_for_end(self, *job_ids: str) -> dict[str, Event]:
        """How each job ended. Each ends exactly once, and has no event after that."""
        ends: dict[str, Event] = {}
        while missing := [job_id for job_id in job_ids if job_id not in ends]:
            seen = self.wait_for(_is_end, f"end of {missing}")
            assert seen[-1].subject not in ends, f"{seen[-1].subject} ended twice"
            ends[seen[-1].subject] = seen[-1]
        after = [event for event in self.watch_acts() if event.subject in ends]
        assert not after, f"after the end of {sorted(ends)} there was {after}"
        return ends

    def finish(self, *job_ids: str) -> None:
        for end in self.wait_for_end(*job_ids).values():
            assert isinstance(end, JobFinished), f"{end} where the job should have finished"

    def reports(self, job_id: str) -> list[JobReported]:
        return [event for event in self.history if isinstance(event, JobReported) and event.job_id == job_id]


def _is_end(event: Event) -> bool:
    return isinstance(event, JobFinished | JobFailed)


class SubstrateConformance(ABC):
    """Inherit from this in a class that pytest collects, and define `open`."""

    @abstractmethod
    def open(self, sketches: tuple[Sketch, ...], folder: Path) -> SubstrateCase:
        """A new substrate. What outlives a killed controller, such as checkpoints, is kept in `folder`."""

    def leftovers(self, folder: Path) -> list[str]:  # noqa: ARG002 - for those who have some
        """Processes of this folder that still run."""
        return []

    @contextmanager
    def _drive(self, folder: Path, *sketches: Sketch, history: Sequence[Event] = ()) -> Iterator[_Drive]:
        stage = self.open(sketches or (Sketch("a"),), folder)
        try:
            yield _Drive(stage, history)
        finally:
            stage.substrate.close()

    def test_an_admitted_job_does_nothing_until_it_is_started(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            drive.admit("a")
            acts = drive.watch_acts()
            assert not acts, f"a job that was not started did something: {acts}"

    def test_a_started_job_reports_its_progress_and_finishes_once(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            drive.admit("a")
            drive.start("a")
            drive.finish("a")
            work = [report.work_done for report in drive.reports("a")]
            assert len(work) >= 2, f"{len(work)} reports are too few to see progress"
            assert work == sorted(set(work)), f"work done does not increase: {work}"
            total = drive.stage.jobs["a"].work.total_units
            assert total is None or work[-1] <= total * (1 + 1e-9), f"{work[-1]} of {total} units done"
            starts = [report.resize_s for report in drive.reports("a") if report.resize_s is not None]
            assert len(starts) == 1, f"one start, and its duration was reported {len(starts)} times"
            assert starts[0] >= 0

    def test_time_passes_whether_or_not_anything_happens(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            tick_s = drive.stage.tick_s
            before_s = drive.substrate.now_s()
            assert drive.next(before_s + tick_s / 4) is None
            drive.admit("a")
            drive.start("a")
            for _ in range(20):  # in steps much shorter than a report takes
                drive.watch(tick_s / 20)
            assert drive.substrate.now_s() >= before_s + 1.25 * tick_s * (1 - 1e-9)

    def test_an_instruction_given_twice_is_carried_out_once(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            drive.admit("a")
            drive.start("a")
            drive.substrate.apply(drive.instructions)
            drive.wait_for_report("a")
            drive.tell(Action.PARK, "a", Allocation())
            drive.watch(0.0)
            drive.substrate.apply(drive.instructions[:1])
            assert not drive.watch_acts(), "an old START started a parked job"
            drive.start("a")
            drive.finish("a")
            drive.substrate.apply(drive.instructions)
            assert not drive.watch_acts(), "an old START started a finished job"

    def test_a_resize_keeps_the_work_done(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            drive.admit("a")
            drive.start("a")
            done = drive.wait_for_report("a", epoch=2).work_done
            drive.tell(Action.RESIZE, "a", drive.stage.large)
            drive.finish("a")
            self._check_kept(drive, done)
            workers = [sample.workers for report in drive.reports("a") for sample in report.speeds]
            expected = [drive.stage.small.worker_count, drive.stage.large.worker_count]
            assert list(dict.fromkeys(workers)) == expected, f"speeds were measured with {workers} workers"

    def test_a_new_batch_size_keeps_the_work_done(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            drive.admit("a")
            drive.start("a")
            done = drive.wait_for_report("a", epoch=2).work_done
            drive.tell(Action.SET_BATCH, "a", drive.stage.small, drive.stage.other_batch)
            drive.finish("a")
            self._check_kept(drive, done)
            atomic = [sample.atomic for report in drive.reports("a") for sample in report.speeds]
            expected = [drive.stage.batch.atomic, drive.stage.other_batch.atomic]
            assert list(dict.fromkeys(atomic)) == expected, f"speeds were measured with batches {atomic}"

    def test_a_parked_job_stands_still_and_goes_on_when_started(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            drive.admit("a")
            drive.start("a")
            done = drive.wait_for_report("a", epoch=2).work_done
            drive.tell(Action.PARK, "a", Allocation())
            drive.watch(0.0)  # what was said before it stood still
            moved = drive.watch_acts()
            assert not moved, f"a parked job did something: {moved}"
            drive.start("a")
            drive.finish("a")
            self._check_kept(drive, done)

    def test_a_failed_job_affects_no_other(self, tmp_path: Path) -> None:
        with self._drive(tmp_path, Sketch("a"), Sketch("b", fails=True)) as drive:
            drive.admit("a", "b")
            drive.start("a", "b")
            ends = drive.wait_for_end("a", "b")
            assert isinstance(ends["a"], JobFinished), f"the healthy job ended with {ends['a']}"
            assert isinstance(ends["b"], JobFailed), f"the failing job ended with {ends['b']}"
            assert ends["b"].error, "a failure must say what went wrong"

    def test_two_jobs_run_side_by_side(self, tmp_path: Path) -> None:
        with self._drive(tmp_path, Sketch("a"), Sketch("b")) as drive:
            drive.admit("a", "b")
            drive.start("a", "b")
            drive.finish("a", "b")
            ends = [event.subject for event in drive.history if _is_end(event)]
            first_end = next(i for i, event in enumerate(drive.history) if _is_end(event))
            other = next(job_id for job_id in ("a", "b") if job_id != ends[0])
            early = [e for e in drive.history[:first_end] if isinstance(e, JobReported) and e.job_id == other]
            assert early, f"{other} reported nothing before {ends[0]} ended"

    def test_close_leaves_nothing_running(self, tmp_path: Path) -> None:
        with self._drive(tmp_path, Sketch("a"), Sketch("b")) as drive:
            drive.admit("a", "b")
            drive.start("a", "b")
            drive.wait_for_report("a")
        left = self.leftovers(tmp_path)
        assert not left, f"still running after close: {left}"
        drive.substrate.close()

    def test_a_new_substrate_goes_on_from_the_history(self, tmp_path: Path) -> None:
        sketches = tuple(Sketch(job_id) for job_id in ("done", "parked", "running", "waiting"))
        with self._drive(tmp_path, *sketches) as drive:
            drive.admit("done", "parked", "running", "waiting")
            drive.start("done", "parked")
            drive.wait_for_report("parked", epoch=2)
            drive.tell(Action.PARK, "parked", Allocation())
            drive.finish("done")
            drive.start("running")
            done = drive.wait_for_report("running", epoch=2).work_done
            history = drive.history
        with self._drive(tmp_path, *sketches, history=history) as drive:
            drive.substrate.recover(history)
            assert drive.substrate.now_s() >= max(event.t_s for event in history), "the clock went back"
            drive.substrate.apply(drive.instructions)
            drive.finish("running")
            told = {event.subject for event in drive.history[len(history) :]}
            new = told & set(drive.stage.jobs)
            assert new == {"running"}, f"only one job was running, and there are events of {new}"
            self._check_kept(drive, done, job_id="running")
            drive.start("parked", "waiting")
            drive.finish("parked", "waiting")

    def test_a_recorded_request_for_nodes_is_made_again_after_a_crash(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            wish = drive.record_wish()
            history = drive.history
        self._check_comes_true(wish, tmp_path, history)

    def test_a_wish_that_had_begun_to_come_true_does_so_to_its_end(self, tmp_path: Path) -> None:
        with self._drive(tmp_path) as drive:
            wish = drive.record_wish()
            drive.substrate.provision(wish)
            drive.wait_for_node(NodeLaunched)
            history = drive.history
        self._check_comes_true(wish, tmp_path, history)

    def _check_comes_true(self, wish: Wish, folder: Path, history: Sequence[Event]) -> None:
        with self._drive(folder, history=history) as drive:
            drive.substrate.recover(history)
            for _ in range(sum(count for _, count in wish.nodes)):
                drive.wait_for_node(NodeAdded)
            drive.watch(drive.stage.tick_s)
            assert drive.nodes(NodeLaunched) == drive.nodes(NodeAdded), "launched nodes are to be added, once"

    @staticmethod
    def _check_kept(drive: _Drive, done: float, *, job_id: str = "a") -> None:
        """After a report of `done` units, no report is lower by more than `lost_units`."""
        work = [report.work_done for report in drive.reports(job_id)]
        after = work[work.index(done) :]
        assert min(after) >= done - drive.stage.lost_units, f"work was lost: {work}"
        assert max(after) > done, f"there was no progress after {done} units: {work}"
