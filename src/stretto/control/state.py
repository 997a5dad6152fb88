"""The state of a run: a fold over its journal, from which a killed run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.cluster import Node, Wish
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunResumed,
    RunStarted,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.observations import Result
from stretto.journal.folds.holdings import Holdings
from stretto.models.belief import FittedBelief, Observations
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.policies.base import ClusterView, JobView, Memory


@dataclass(slots=True)
class JobState:
    """What is known of one job that is not finished."""

    job: Job
    belief: FittedBelief
    observed: Observations
    number: int = 0
    """Its place in the order of submission."""
    line: Line | None = None
    """The line of equal jobs in which it waits for its first start; None: it is in none."""
    allocation: Allocation = NOTHING
    batch: BatchChoice | None = None
    gpus: int = 0
    starts: int = 0
    attained_gpu_s: float = 0.0
    counted_until_s: float = 0.0
    held_s: float = 0.0
    begun_s: float = 0.0
    """When its last start, resize or retry began."""
    epoch_since_s: float | None = None
    """When its current epoch began; None until it is known to train again."""
    work_done: float = 0.0
    epoch: int = 0
    results: tuple[Result, ...] = ()
    start_times_s: tuple[float, ...] = ()
    idle_view: JobView | None = None
    """Its last view, if it holds nothing and has not changed since."""

    def hold(self, t_s: float, allocation: Allocation) -> None:
        """The job holds `allocation` from now on; add up what it held until now."""
        self.attained_gpu_s += self.gpus * (t_s - self.counted_until_s)
        self.held_s += (t_s - self.counted_until_s) if self.allocation else 0.0
        self.counted_until_s = t_s
        self.begin(t_s)
        self.allocation = allocation
        self.gpus = allocation.gpus(self.job)
        if not allocation:
            self.batch = None

    def begin(self, t_s: float) -> None:
        """A start, resize or retry begins; its current epoch is not timed any more."""
        self.idle_view = None
        self.begun_s, self.epoch_since_s = t_s, None

    def view(self, now_s: float) -> JobView:
        if self.idle_view is not None:
            return self.idle_view.later(now_s - self.job.submit_s, now_s - self.begun_s)
        view = self._view(now_s)
        if not self.allocation and self.epoch_since_s is None:
            self.idle_view = view
        return view

    def _view(self, now_s: float) -> JobView:
        since_s = now_s - self.counted_until_s
        return JobView(
            job=self.job,
            allocation=self.allocation,
            batch=self.batch,
            age_s=now_s - self.job.submit_s,
            attained_gpu_s=self.attained_gpu_s + self.gpus * since_s,
            held_s=self.held_s + since_s if self.allocation.workers else self.held_s,
            start_age_s=now_s - self.begun_s,
            epoch_age_s=None if self.epoch_since_s is None else now_s - self.epoch_since_s,
            restarts=max(0, self.starts - 1),
            work_done=self.work_done,
            epoch=self.epoch,
            results=self.results,
            start_times_s=self.start_times_s,
            belief=self.belief,
        )


@dataclass(slots=True)
class Line:
    """Jobs that wait for their first start and differ only in when they came: the first one is next."""

    kind: Job
    """What they have in common."""
    jobs: dict[str, JobState] = field(default_factory=dict)
    unsaid: list[str] = field(default_factory=list)
    """Jobs whose reason was not yet compared with the last recorded one."""
    said: Reason | None = None
    """The last recorded reason of the jobs in this line that the policy is not shown."""


class _PausedViews(Mapping[str, JobView]):
    """Views of paused trials; each is made when it is looked up."""

    def __init__(self, jobs: Mapping[str, JobState], now_s: float) -> None:
        self._jobs = jobs
        self._now_s = now_s

    def __getitem__(self, job_id: str) -> JobView:
        return self._jobs[job_id].view(self._now_s)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)


@dataclass(slots=True)
class RunState:
    """Everything the controller knows; `apply` is the only way it changes."""

    share_priors: bool = False
    """Whether a new job starts from what finished jobs of its application showed."""
    resize_s: float = DEFAULT_RESIZE_S
    """What a start or resize of an application takes while none was seen."""
    alike: int = 0
    """The most jobs of a line that a policy is shown, unless more could start; 0: all."""
    shelves: bool = False
    """Whether the policy looks up paused trials; then they are not among the jobs of a view."""
    nodes: dict[str, Node] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    jobs: dict[str, JobState] = field(default_factory=dict)
    memory: Memory = None
    wake_at_s: float | None = None
    wish: Wish | None = None
    """The last request for nodes, without its releases, and without nodes refused or lost since."""
    refused: tuple[NodeRefused, ...] = ()
    arrivals: tuple[NodeAdded, ...] = ()
    decisions: int = 0
    instructions: int = 0
    _reasons: dict[str, Reason] = field(default_factory=dict)
    _priors: dict[str, Observations] = field(default_factory=dict)
    _holdings: Holdings = field(default_factory=Holdings)
    _submitted: int = 0
    _lines: dict[Job, Line] = field(default_factory=dict)
    _in_line: dict[str, dict[str, JobState]] = field(default_factory=dict)
    """Jobs that are in a line, by application."""
    _apart: dict[str, JobState] = field(default_factory=dict)
    """Jobs that are in no line and not on the shelf."""
    _shelf: dict[str, JobState] = field(default_factory=dict)
    """Paused trials whose reason to wait was repeated: nothing changes until they report or are named."""

    @property
    def is_idle(self) -> bool:
        """Whether no job holds anything."""
        return not any(state.allocation for state in self._apart.values())

    def is_news(self, job_id: str, reason: Reason) -> bool:
        """Whether a job's reason differs from the last recorded one."""
        said = self._reasons.get(job_id)
        return said is not reason and said != reason

    def news_of_hidden(self, shown: Mapping[str, Reason]) -> dict[str, Reason]:
        """Reasons of jobs that the policy was not shown: that of the last shown job of their line."""
        news: dict[str, Reason] = {}
        most = self._most_shown()
        for line in self._lines.values():
            if len(line.jobs) <= most:
                continue
            reason = shown.get(next(islice(line.jobs, most - 1, None)))
            if reason is None or reason.code is not ReasonCode.WAITS:
                continue
            hidden = islice(line.jobs, most, None) if reason != line.said else line.unsaid
            news |= {job_id: reason for job_id in hidden if self._is_hidden_news(line, job_id, reason)}
            line.said, line.unsaid = reason, []
        return {job_id: reason for job_id, reason in news.items() if job_id not in shown}

    def _is_hidden_news(self, line: Line, job_id: str, reason: Reason) -> bool:
        return job_id in line.jobs and self.is_news(job_id, reason)

    def _most_shown(self) -> int:
        """The most jobs of a line to show: one more than could start; its reason also holds for the rest."""
        return max(self.alike, sum(node.gpus for node in self.nodes.values()) + 1)

    def _shown(self) -> list[JobState]:
        """Jobs that a policy is shown, in order of submission."""
        most = self._most_shown()
        if not self._shelf and all(len(line.jobs) <= most for line in self._lines.values()):
            return list(self.jobs.values())
        shown = list(self._apart.values())
        for line in self._lines.values():
            shown += islice(line.jobs.values(), most)
        return sorted(shown, key=lambda state: state.number)

    def view(self, now_s: float) -> ClusterView:
        shown = self._shown()
        return ClusterView(
            now_s=now_s,
            nodes=tuple(node for node in self.nodes.values() if node.id not in self.draining),
            jobs=tuple(state.view(now_s) for state in shown),
            paused=_PausedViews(self._shelf, now_s),
            hidden=len(self.jobs) - len(shown) - len(self._shelf),
            refused=self.refused,
            arrivals=self.arrivals,
        )

    def view_of(self, view: ClusterView, decision: Decision) -> ClusterView:
        """The view, with the paused trials that a decision names among its jobs, in order of submission."""
        names = {*decision.allocations, *decision.stops, *decision.reasons} & self._shelf.keys()
        if not names:
            return view
        shown = sorted(
            [*self._shown(), *(self._shelf[name] for name in names)], key=lambda state: state.number
        )
        return replace(view, jobs=tuple(state.view(view.now_s) for state in shown))

    def apply(self, event: Event) -> None:
        self._drop_holdings(event)
        match event:
            case JobSubmitted():
                self._submit(event.job)
            case JobReported() | JobRetried() | JobFinished() | JobFailed() | WorkerLost():
                if event.job_id in self.jobs:  # else it was stopped, and this was still on its way
                    self._unshelve(event.job_id)
                    self._heard_of(event)
            case RunStarted():
                self.nodes = {node.id: node for node in event.nodes}
            case Decided():
                self._decided(event)
            case NodeAdded() | NodeLost() | NodeReleased() | NodeDraining():
                self._change_nodes(event)
            case NodeRefused():
                self.refused += (event,)
                self._expect_less(event.instance, event.count)
            case RunResumed():
                self._begin_all(event.t_s)
            case NodeLaunched() | CheckpointSaved() | JobNoted():
                pass

    def _drop_holdings(self, event: Event) -> None:
        """Jobs that ended, or lost a worker or a node, hold nothing any more."""
        for handover in self._holdings.observe(event):
            if handover.instruction is None:
                self.jobs[handover.job_id].hold(event.t_s, NOTHING)

    def _begin_all(self, t_s: float) -> None:
        for state in self.jobs.values():
            state.begin(t_s)

    def _heard_of(self, event: JobReported | JobRetried | JobFinished | JobFailed | WorkerLost) -> None:
        match event:
            case JobReported():
                self._report(event)
            case JobFinished():
                self._remember(self._forget(event.job_id))
            case JobFailed():
                self._forget(event.job_id)
            case WorkerLost():
                self.jobs[event.job_id].hold(event.t_s, NOTHING)
            case JobRetried():
                self.jobs[event.job_id].begin(event.t_s)

    def _submit(self, job: Job) -> None:
        observed = Observations()
        prior = self._priors.setdefault(job.application, Observations()) if self.share_priors else None
        belief = FittedBelief(job, observed, prior, self.resize_s)
        self._submitted += 1
        self.jobs[job.id] = state = JobState(job, belief, observed, self._submitted)
        if self.alike and job.study is None and job.worker.demand.gpu >= 1:
            self._join_line(state)
        else:
            self._apart[job.id] = state

    def _join_line(self, state: JobState) -> None:
        """Add it to the line of equal jobs. Applications without observations count as equal."""
        job, seen = state.job, self._priors.get(state.job.application)
        application = job.application if seen is not None and seen != Observations() else ""
        kind = replace(job, id="", application=application, submit_s=0.0, config=())
        state.line = self._lines.setdefault(kind, Line(kind))
        state.line.jobs[job.id] = state
        state.line.unsaid.append(job.id)
        self._in_line.setdefault(job.application, {})[job.id] = state

    def _leave_line(self, state: JobState) -> None:
        """Remove it from its line, as it now differs from the other jobs there."""
        line, job = state.line, state.job
        if line is None:
            return
        state.line = None
        self._apart[job.id] = state
        del line.jobs[job.id]
        if not line.jobs:
            del self._lines[line.kind]
        of_application = self._in_line[job.application]
        del of_application[job.id]
        if not of_application:
            del self._in_line[job.application]

    def _forget(self, job_id: str) -> JobState:
        """Remove a job that is over."""
        state = self.jobs.pop(job_id)
        self._leave_line(state)
        del self._apart[job_id]
        self._reasons.pop(job_id, None)
        return state

    def _report(self, event: JobReported) -> None:
        state = self.jobs[event.job_id]
        self._leave_line(state)
        state.idle_view = None
        state.work_done, state.epoch = event.work_done, event.epoch
        for sample in event.speeds:
            state.observed.add_speed(sample)
        if event.noise is not None:
            state.observed.set_noise(event.noise)
        state.observed.losses.extend(event.losses)
        if event.results:
            state.results += event.results
            state.epoch_since_s = event.t_s
        if event.resize_s is not None:
            state.observed.resizes.add(event.resize_s)
            state.start_times_s += (event.resize_s,)
            state.epoch_since_s = max(state.epoch_since_s or 0.0, state.begun_s + event.resize_s)

    def _remember(self, state: JobState) -> None:
        """A finished job's observations become the prior of its application."""
        if not self.share_priors:
            return
        application = state.job.application
        prior = self._priors.setdefault(application, Observations())
        is_first = prior == Observations()
        for sample in state.observed.speeds.values():
            prior.add_speed(sample)
        prior.noise = state.observed.first_noise or prior.noise
        prior.resizes.add_all(state.observed.resizes)
        if is_first and prior != Observations():
            for waiting in list(self._in_line.get(application, {}).values()):
                self._leave_line(waiting)
                del self._apart[waiting.job.id]
                self._join_line(waiting)

    def _decided(self, event: Decided) -> None:
        self.memory = event.memory
        self.wake_at_s = event.wake_at_s
        if event.wish is not None:
            self._wished(event.wish)
        self._reasons.update(event.reasons)
        self.decisions += 1
        for instruction in event.instructions:
            self._unshelve(instruction.job_id)
            self._instructed(event.t_s, instruction)
        if self.shelves:
            self._shelve(event.reasons)

    def _shelve(self, news: Mapping[str, Reason]) -> None:
        """Put trials on the shelf if they wait for the same reason as before."""
        for job_id in news:
            self._unshelve(job_id)
        paused = [job_id for job_id in self._apart if job_id not in news and self._is_paused(job_id)]
        for job_id in paused:
            self._shelf[job_id] = self._apart.pop(job_id)

    def _is_paused(self, job_id: str) -> bool:
        state, reason = self._apart[job_id], self._reasons.get(job_id)
        waits = reason is not None and reason.code is ReasonCode.WAITS
        return waits and state.starts > 0 and not state.allocation and state.job.study is not None

    def _unshelve(self, job_id: str) -> None:
        state = self._shelf.pop(job_id, None)
        if state is not None:
            self._apart[job_id] = state

    def _instructed(self, t_s: float, instruction: Instruction) -> None:
        self.instructions = instruction.number
        if instruction.action is Action.STOP:
            self._forget(instruction.job_id)
            return
        state = self.jobs[instruction.job_id]
        self._leave_line(state)
        state.idle_view = None
        state.batch = instruction.batch
        if instruction.action is not Action.SET_BATCH:
            state.hold(t_s, instruction.allocation)
            state.starts += instruction.action is not Action.PARK

    def _wished(self, wish: Wish) -> None:
        """Nodes to be given back are unavailable at once, though they may take a while to disappear."""
        self.wish = Wish(wish.nodes)
        for node_id in wish.release:
            self.nodes.pop(node_id, None)

    def _expect_less(self, instance: str, count: int) -> None:
        """A policy that still wants these nodes must request them again."""
        if self.wish is not None:
            self.wish = self.wish.less(instance, count)

    def _change_nodes(self, event: NodeAdded | NodeLost | NodeReleased | NodeDraining) -> None:
        if isinstance(event, NodeAdded):
            self.draining.discard(event.node.id)
            self.nodes[event.node.id] = event.node
            if event.node.instance:
                self.arrivals += (event,)
            return
        node = self.nodes.get(event.node_id)
        if node is not None and node.instance and event.node_id not in self.draining:
            self._expect_less(node.instance, 1)
        if isinstance(event, NodeDraining):
            self.draining.add(event.node_id)
            return
        self.draining.discard(event.node_id)
        self.nodes.pop(event.node_id, None)
