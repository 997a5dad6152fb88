"""A gang that runs a command: every resize is a restart of all its processes.

Each incarnation of such a gang is one start. All its processes get SIGTERM and end before the next start
begins, so the new ones find what the old ones saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.allocation import Allocation, on_nodes
from stretto.core.events import JobFinished, JobReported, NoteKind
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job, Tier
from stretto.substrate.elastic.command import Command, filled_in, own_environment, own_folder
from stretto.substrate.elastic.command_output import (
    CommandGoal,
    CommandSetup,
    EpochMark,
    Progress,
    Trial,
    read_report,
)
from stretto.substrate.elastic.crew import Goal, Member, Phase
from stretto.substrate.elastic.effects import Effect, Moment, Rules, Send, TrainingJob, Write
from stretto.substrate.elastic.gang import Gang
from stretto.substrate.elastic.guard import START, TOKEN
from stretto.substrate.elastic.losses import KILLED, Cause, Losses
from stretto.substrate.elastic.shared_files import SharedFolder, overwritten
from stretto.wire.messages import (
    CommandOrder,
    EndNow,
    Failed,
    Finished,
    Flooded,
    FromWorker,
    Left,
    LetEnd,
    Note,
    Printed,
    ToWorker,
)

FLOOD = (
    "its command prints very fast, so Stretto reads at most 2 MB and 200 epochs a second of it; no epoch is "
    "lost, step lines in between are skipped"
)


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """What a line of output meant."""

    report: bool = False
    result: bool = False
    """Whether it has a new result of a trial."""
    problems: tuple[str, ...] = ()
    """Problems with it that this start has not logged yet."""
    wrong: str = ""
    """Why its metric does not count; given once."""
    passes: bool = False
    """Whether it is the first line after the last epoch."""


@dataclass(slots=True)
class PrintedAccount:
    """The account of a job that runs a command."""

    job: Job
    metric: str | None
    progress: Progress = field(default_factory=Progress)
    missed: tuple[bytes, ...] = ()
    """Lines of the metrics file from before a recovery, which may not have been reported."""
    _mark: EpochMark = field(default_factory=EpochMark)
    _waiting: list[JobReported] = field(default_factory=list)
    _problems: set[str] = field(default_factory=set)
    _has_shown_wrong: bool = False
    _passed: bool = False

    @property
    def asked(self) -> CommandGoal:
        return CommandGoal(self.job.work.epochs, self.metric)

    @property
    def reached(self) -> Progress:
        return self.progress

    @property
    def complete(self) -> bool:
        """Whether it has shown its last epoch; the job is then done, even if the command still runs."""
        return self._passed or self.asked.is_shown(self.progress)

    def begin(self, setup: CommandSetup, *, t_s: float) -> None:
        """The command starts; missed lines are read first."""
        for line in self.missed:
            self.read_missed(line, setup, t_s=t_s)
        self.missed = ()
        self._mark = EpochMark(0 if self.job.tier is Tier.RIGID else self.progress.result_epoch)
        self._problems.clear()

    def read(self, line: bytes, setup: CommandSetup, *, t_s: float) -> LineOutcome:
        """Read a line and hold its report."""
        reading = read_report(line, setup, self.progress, t_s=t_s, mark=self._mark)
        self._mark = reading.mark
        new = tuple(problem for problem in reading.problems if problem not in self._problems)
        self._problems.update(new)
        passes, was_complete = not self._passed and self.asked.is_passed(reading), self.complete
        self._passed |= passes
        wrong = "" if self._has_shown_wrong else reading.wrong
        self._has_shown_wrong |= bool(wrong)
        if reading.report is None or was_complete:
            return LineOutcome(problems=new, wrong=wrong, passes=passes)
        self._hold(reading.report)
        result = bool(reading.report.results)
        return LineOutcome(report=True, result=result, problems=new, wrong=wrong, passes=passes)

    def read_missed(self, line: bytes, setup: CommandSetup, *, t_s: float) -> LineOutcome:
        """Read a line that was printed before the current start. Of such lines only new results count."""
        report = read_report(line, setup, self.progress, t_s=t_s, mark=EpochMark(counts=False)).report
        if report is not None and report.results and not self.complete:
            self._hold(report)
        return LineOutcome()  # it says nothing about the present start

    def tell(self, *, t_s: float, resize_s: float | None = None) -> list[JobReported]:
        reports, self._waiting = self._waiting, []
        last = len(reports) - 1
        return [
            replace(report, t_s=t_s, resize_s=resize_s if position == last else None)
            for position, report in enumerate(reports)
        ]

    def _hold(self, report: JobReported) -> None:
        self.progress = self.progress.after(report)
        self._waiting.append(report)


@dataclass(slots=True)
class SaidOnce:
    """State that all commands of a run share: notes that are given once, and their folders."""

    flooding: set[str] = field(default_factory=set)
    """Studies (or jobs without one) with a note that their command prints too fast."""
    _folders: dict[Path, SharedFolder] = field(default_factory=dict)

    def folder(self, command: Command) -> SharedFolder | None:
        """The folder in which a command runs with others; None if it has its own."""
        if command.in_folder:
            return None
        folder = command.launch_folder
        return self._folders.setdefault(folder, SharedFolder(folder))


def lines_of(metrics: Path) -> tuple[bytes, ...]:
    """The lines of a job's metrics file."""
    return tuple(metrics.read_bytes().splitlines()) if metrics.is_file() else ()


class CommandGang(Gang):
    """One job's processes. Rank 0 reports.

    A command that has shown its last epoch may end by itself within the grace; then it is asked to, and at
    once if it shows another epoch. The job has finished when all processes are gone, however they ended.
    """

    _account: PrintedAccount

    def __init__(
        self,
        job: Job,
        spec: TrainingJob,
        command: Command,
        rules: Rules,
        log: str,
        *,
        account: PrintedAccount,
        losses: Losses,
        places_of: Callable[[Allocation], Counter[str]],
        starts: int,
        token: str = "",
        life: str = "",
        said: SaidOnce | None = None,
    ) -> None:
        """`starts` counts earlier starts. Processes are found by `token`; `life` identifies the
        controller.
        """
        super().__init__(job, spec, rules, log, account=account, losses=losses, places_of=places_of)
        self._command = command
        self._starts = starts
        self._token = token
        self._life = life
        self._said = SaidOnce() if said is None else said
        self._noted: set[str] = set()
        """Notes of its workers; each text is passed on once."""
        self._setup: CommandSetup | None = None
        """The configuration of the present incarnation."""
        self._starting_s: float | None = None
        """When the present start was asked for; None once its first report has come."""
        self._done = False
        """Whether all epochs were shown, so that the job finishes when its processes are gone."""
        self._late = ""
        """The note about how it then ended."""
        self._late_log = ""
        """The log for that note, if it failed."""
        self._was_killed = False
        """Whether a process of this incarnation did not end within the grace."""

    @property
    def command(self) -> CommandOrder:
        assert self._setup is not None, "a worker is started in an incarnation"
        setup, restarts, job_folder = self._setup, self._starts - 1, Path(self._log).parent
        cwd = own_folder(job_folder) if self._command.in_folder else self._command.cwd
        own = own_environment(self._command, setup, restarts=restarts, job_folder=job_folder)
        return CommandOrder(
            argv=tuple(filled_in(self._command, self.job, setup, job_folder=job_folder)),
            env={**own, TOKEN: self._token, START: f"{self._life}.{restarts}"} if self._token else own,
            cwd="" if cwd is None else str(cwd),
            metric=self.spec.metric,
            keys=tuple(sorted(setup.keys)),
            tells_missed=setup.trial is not None and restarts > 0,
            restarts=restarts,
            grace_s=self._rules.command_s,
        )

    # Instructions

    def instruct(self, instruction: Instruction, now: Moment) -> list[Effect]:
        if self._done and instruction.action in {Action.PARK, Action.STOP}:
            self._done = instruction.action is Action.PARK  # a stopped job does not finish as well
            self._end_all()
            return self._settle(now)
        return super().instruct(instruction, now)

    def close(self, now: Moment) -> list[Effect]:
        if self._done:
            self._end_all()
        return super().close(now)

    def finish_if_complete(self, now: Moment) -> list[Effect]:
        if self.phase is Phase.IDLE and self.goal is not Goal.OVER and self._account.complete:
            self._finish_unstarted(now)
        return super().finish_if_complete(now)

    def kill(self, now: Moment) -> list[Effect]:
        """Kill the processes at once. The workers stay until nothing is left of them."""
        self.goal = Goal.OVER if self.goal is Goal.OVER else Goal.REST
        self._hold_no_more(now)
        self._tell_group(EndNow())
        self._crew.dismiss(*(one for one in self._crew.members.values() if not self._crew.has(one)))
        self.phase = Phase.ENDING
        self._kill_at_s = now.awake_s + self._rules.grace_s
        return self._settle(now)

    # Transitions

    def _reach_size(self, now: Moment) -> None:
        if not self._crew.members:
            self._begin(now)
        elif not self._is_as_ordered():
            self._order.asked_s = now.t_s if self._order.asked_s is None else self._order.asked_s
            self._kill_at_s = now.awake_s + self._rules.park_s
            self._wind_down()
            return
        if self.goal is Goal.RUN:
            super()._reach_size(now)

    def _begin(self, now: Moment) -> None:
        order = self._order
        assert order.batch is not None
        trial = None if self.spec.metric is None else Trial(self.spec.metric, self.job.work.epochs)
        self._setup = CommandSetup(self.job.id, on_nodes(order.places), order.batch, trial)
        self._starts += 1
        # For a command, the first report ends the start.
        self._starting_s, order.asked_s = now.t_s if order.asked_s is None else order.asked_s, None
        self._account.begin(self._setup, t_s=now.t_s)
        self._tell(now)
        if self._account.complete:
            self._finish_unstarted(now)

    def _finish_unstarted(self, now: Moment) -> None:
        self.goal, self.phase = Goal.OVER, Phase.IDLE
        self._emit(JobFinished(t_s=now.t_s, job_id=self.job.id))

    def _is_as_ordered(self) -> bool:
        setup, order = self._setup, self._order
        assert setup is not None
        return setup.allocation == on_nodes(order.places) and setup.batch == order.batch

    def _form(self, order: tuple[str, ...], now: Moment) -> None:
        """Ranks of one node are consecutive, as with torchrun."""
        nodes, members = list(self._order.places), self._crew.members
        super()._form(tuple(sorted(order, key=lambda one: nodes.index(members[one].node))), now)
        if folder := self._said.folder(self._command):
            folder.started(self.job.id)

    def _wind_down(self) -> None:
        if self.goal is Goal.EPOCH and self._crew.formed:
            return  # the next result is the end of an epoch
        super()._wind_down()

    def _conclude(self, now: Moment) -> None:
        folder = self._said.folder(self._command)
        if folder is not None and (found := folder.ended(self.job.id)) is not None:
            self._note(overwritten(found, folder.folder), now)
        if self._was_killed and self.goal is not Goal.OVER and not self._losses.causes:
            text = f"{KILLED}, {self._rules.command_s:g} s after SIGTERM"
            self._note(text, now, NoteKind.NOT_SAVED)
        self._was_killed = False
        super()._conclude(now)
        if self._done:
            self._done = False
            if self._late:
                self._note(self._late, now, log=self._late_log)
            self._emit(JobFinished(t_s=now.t_s, job_id=self.job.id))

    def _lost(self, member: Member, cause: Cause, now: Moment) -> None:
        """End the others, which may not notice the loss."""
        super()._lost(member, cause, now)
        if self.phase is Phase.ENDING:
            self._crew.dismiss(*self._crew.members.values())

    # Messages of workers

    def _take(self, member: Member, message: FromWorker, now: Moment) -> None:
        match message:
            case Printed() if member.led and (self.goal is not Goal.OVER or self._done):
                self._read(message, now)
            case Flooded() if (who := self.job.study or self.job.id) not in self._said.flooding:
                self._said.flooding.add(who)
                self._note(FLOOD, now)
            case Note() if message.text not in self._noted:
                self._noted.add(message.text)
                self._note(message.text, now)
            case Printed() | Flooded() | Note():
                pass
            case _:
                super()._take(member, message, now)

    def _take_last_word(self, member: Member, message: Finished | Failed | Left, now: Moment) -> None:
        self._was_killed |= isinstance(message, Left) and message.killed
        if self._done and isinstance(message, Left):
            self._late = self._late or self._account.asked.why_ended(self._account.progress)
        elif self._done and isinstance(message, Failed) and not member.outgoing:
            self._late = self._late or (
                f"after the last epoch that was asked for its command failed: {message.traceback}"
            )
            self._late_log = self._late_log or self._log
        super()._take_last_word(member, message, now)

    def _finish(self, member: Member, now: Moment) -> None:
        if not self._done:
            super()._finish(member, now)

    def _tell_last(self, now: Moment) -> None:
        super()._tell_last(now)
        if lacks := self._account.asked.what_lacks(self._account.progress):
            self._note(lacks, now)

    def _read(self, printed: Printed, now: Moment) -> None:
        assert self._setup is not None
        read = self._account.read_missed if printed.missed else self._account.read
        seen = read(printed.text.encode(), self._setup, t_s=now.t_s)
        if seen.problems:
            notes = "".join(f"stretto: left out of a report: {problem}\n" for problem in seen.problems)
            self._crew.out.append(Write(self._log, notes))
        if seen.report and self._starting_s is not None:
            self._resize_s, self._starting_s = now.t_s - self._starting_s, None
        if not self._order.holds_reports:
            self._tell(now)
        if seen.wrong:
            self._note(seen.wrong, now)
        if self._account.complete and not self._done:
            self._complete(now)
        elif seen.result and self.goal is Goal.EPOCH:
            self._rest(Goal.REST, now.awake_s + self._rules.park_s)
        if seen.passes:
            self._end_all()

    def _complete(self, now: Moment) -> None:
        ends_anyway = self.phase is Phase.ENDING
        self.goal, self.phase, self._done = Goal.OVER, Phase.ENDING, True
        self._hold_no_more(now)
        if not ends_anyway:
            self._kill_at_s = now.awake_s + self._rules.command_s + self._rules.grace_s
            self._tell_group(LetEnd())

    # Helpers

    def _tell_group(self, message: ToWorker) -> None:
        """Tell all ranks, as the processes of a command do not agree on anything."""
        self._crew.out.extend(Send(worker_id, message) for worker_id in self._crew.group)
