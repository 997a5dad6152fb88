"""The workers of one job as a state machine: starts, resizes and parks them. Inputs in, effects out, no I/O.

An incarnation of the gang lives from its first worker to its last:

    IDLE ──▶ LIVE ──▶ ENDING ──▶ IDLE      the next one starts only when nothing of the last is left

A live gang starts without a group, forms one, trains and resizes in place. Newcomers warm up while the group
trains, and join when all of them are ready. A smaller group forms at once. The next group forms only after
the last one has said that it trains. The last instruction counts; newcomers that it does not need are sent
away.

A gang moves to other nodes in the same way: the leavers train until the newcomers are ready. If no member
stays, leavers and newcomers form one group for a moment, in which the newcomers get the state. If the
newcomers get no slot, perhaps because another gang waits for ours, the leavers go first.

If a worker is lost, the whole group ends, and starts again from its checkpoint. If a newcomer is lost, the
group trains on and others are tried. If these are lost too, the group keeps its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.events import Event, JobFailed, JobFinished, JobNoted, NoteKind
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.elastic.crew import Crew, GangOrder, Goal, Member, Phase, as_order
from stretto.substrate.elastic.effects import Effect, Emit, Moment, Rules, Send, TrainingJob, WorkerExit
from stretto.substrate.elastic.losses import KILLED, Blame, Cause, Losses
from stretto.substrate.elastic.reports import Account
from stretto.wire.messages import (
    Ack,
    Beat,
    CommandOrder,
    Described,
    Failed,
    Finished,
    FinishEpoch,
    Formed,
    FromWorker,
    Left,
    Note,
    Park,
    Printed,
    Ready,
    Report,
    Saved,
    SetBatch,
    ToWorker,
)


class Gang:
    """One job's workers. Every method returns the effects that must be carried out."""

    def __init__(
        self,
        job: Job,
        spec: TrainingJob,
        rules: Rules,
        log: str,
        *,
        account: Account,
        losses: Losses,
        places_of: Callable[[Allocation], Counter[str]],
    ) -> None:
        """`places_of` gives the number of workers of an allocation on each node."""
        self.job = job
        self.spec = spec
        self.goal = Goal.REST
        self.phase = Phase.IDLE
        self.described: Described | None = None
        self._rules = rules
        self._log = log
        self._account = account
        self._crew = Crew(job.id)
        self._order = GangOrder()
        self._told_batch: BatchChoice | None = None
        self._resize_s: float | None = None
        """How long the last start or resize took; None once it was reported."""
        self._stepped_s = 0.0
        self._kill_at_s = math.inf
        self._losses = losses
        self._places_of = places_of

    @property
    def workers(self) -> tuple[str, ...]:
        """All that are not gone, including those that wait for a slot."""
        return tuple(self._crew.members)

    @property
    def command(self) -> CommandOrder | None:
        """The command that its workers run instead of training code."""
        return None

    @property
    def busy(self) -> bool:
        return bool(self._crew.members) or self.goal is Goal.RUN

    @property
    def is_born(self) -> bool:
        """Whether one of its processes runs. May be called in any thread."""
        return any(member.heard_s is not None for member in tuple(self._crew.members.values()))

    # Instructions

    def instruct(self, instruction: Instruction, now: Moment) -> list[Effect]:
        if self.goal is Goal.OVER:
            return []  # it ended before the instruction came
        match instruction.action:
            case Action.START | Action.RESIZE:
                self._run(instruction.allocation, instruction.batch, now)
            case Action.SET_BATCH:
                self._order.batch = instruction.batch
            case Action.PARK:
                self._order.holds_reports = True
                self._rest(Goal.REST, now.awake_s + self._rules.park_s)
            case Action.STOP:
                self.goal = Goal.OVER
                self._hold_no_more(now)
                self._end_all()
        return self._settle(now)

    def close(self, now: Moment) -> list[Effect]:
        """Save and leave, within the grace."""
        if self.goal is not Goal.OVER:
            self._rest(Goal.REST, now.awake_s + self._rules.grace_s)
        self._hold_no_more(now)
        return self._settle(now)

    def finish_if_complete(self, now: Moment) -> list[Effect]:
        """If the record has all that the job was to do, it has finished."""
        return self._settle(now)

    def finish_epoch(self, now: Moment) -> list[Effect]:
        """Save and leave when the present epoch is over."""
        if self.goal is Goal.RUN:
            self._rest(Goal.EPOCH, math.inf)
        return self._settle(now)

    def kill(self, now: Moment) -> list[Effect]:
        """End everything at once."""
        self.goal = Goal.OVER if self.goal is Goal.OVER else Goal.REST
        self._hold_no_more(now)
        self._kill_all()
        return self._settle(now)

    def acknowledge(self, epoch: int) -> list[Effect]:
        """The controller has decided about the results up to this epoch."""
        leaders = dict.fromkeys(self._crew.formed[:1] + self._crew.forming[:1])
        return [Send(leader, Ack(epoch)) for leader in leaders]

    def strand(self, node: str, now: Moment) -> list[Effect]:
        """A node is gone: rest until an instruction says where to continue."""
        crew = self._crew
        lost = [member for member in crew.members.values() if member.node == node]
        if self.goal in {Goal.RUN, Goal.EPOCH} and (lost or node in self._order.allocation.nodes):
            self._order.holds_reports = True
            self._losses.causes.clear()
            self._rest(Goal.REST, now.awake_s + self._rules.park_s)
            if self.phase is Phase.LIVE and any(crew.has(member) for member in lost):
                self._end_all()  # the rest of the group cannot save any more
        crew.kill(*lost)
        return self._settle(now)

    # News of workers

    def seated(self, worker_id: str) -> list[Effect]:
        """A worker has a slot, and starts."""
        member = self._crew.members.get(worker_id)
        if member is not None:
            member.seated = True
        return []

    def born(self, worker_id: str, now: Moment) -> list[Effect]:
        member = self._crew.members.get(worker_id)
        if member is not None and member.heard_s is None:
            member.heard_s = now.awake_s
        return []

    def note(self, text: str, now: Moment) -> list[Effect]:
        """Add a note for the user about the workers."""
        self._note(text, now)
        return self._settle(now)

    def hear(self, worker_id: str, message: FromWorker, now: Moment) -> list[Effect]:
        member = self._crew.members.get(worker_id)
        if member is not None:
            member.heard_s = now.awake_s
            if isinstance(message, Beat):
                self._beat(member, message, now)
                return []
            if isinstance(message, Finished | Failed | Left):
                member.spoke = True
                member.kill_at_s = now.awake_s + self._rules.grace_s
                self._take_last_word(member, message, now)
            elif not member.outgoing or isinstance(
                message, Report | Saved | Printed
            ):  # its last reports count
                self._take(member, message, now)
        return self._settle(now)

    def lose(self, worker_id: str, why: str, now: Moment) -> list[Effect]:
        """A worker still runs but cannot be used."""
        member = self._crew.members.get(worker_id)
        if member is not None:
            self._give_up([member], why, now)
        return self._settle(now)

    def gone(self, worker_id: str, how: WorkerExit, now: Moment) -> list[Effect]:
        member = self._crew.members.pop(worker_id, None)
        if member is not None and not member.spoke:
            self._lost(member, Cause(Blame.DIED, how.text, how.final), now)
        return self._settle(now)

    def tick(self, now: Moment) -> list[Effect]:
        """Time has passed."""
        overdue = [m for m in self._crew.members.values() if m.kill_at_s <= now.awake_s]
        self._crew.kill(*overdue)
        silent = self._crew.silent(now.awake_s - self._rules.heartbeat_s)
        self._give_up(silent, f"a worker gave no sign of life for {self._rules.heartbeat_s:g} s", now)
        if self._hangs(now):
            text = f"no step was taken for {self._rules.hang_s:g} s (Rules.hang_s says how long is too long)"
            self._give_up([m for m in self._crew.members.values() if self._crew.has(m)], text, now)
        if self._kill_at_s <= now.awake_s:
            self._kill_late(now)
        return self._settle(now)

    # Transitions

    def _run(self, allocation: Allocation, batch: BatchChoice, now: Moment) -> None:
        live, crew = self.phase is Phase.LIVE, self._crew
        places = self._places_of(allocation)
        asked_s: float | None = now.t_s
        if live and places == crew.on(crew.formed) and not crew.forming:
            asked_s = None  # it has that size already
        elif live and (not crew.formed or places == crew.on(crew.forming)):
            asked_s = self._order.asked_s  # it is on the way
        self.goal = Goal.RUN
        self._order = GangOrder(allocation, batch, places, asked_s)
        self._losses.newcomers = 0
        if live:
            self._kill_at_s = math.inf

    def _rest(self, goal: Goal, kill_at_s: float) -> None:
        self.goal, before = goal, self.goal
        self._order.asked_s = None
        self._kill_at_s = min(self._kill_at_s, kill_at_s)
        if before is Goal.EPOCH and goal is Goal.REST and self.phase is Phase.ENDING:
            self._tell_group(Park())

    def _settle(self, now: Moment) -> list[Effect]:
        """Take the transitions that are possible now, and return the effects."""
        if self.phase is Phase.LIVE and self.goal is Goal.RUN:
            self._reach_size(now)
        elif self.phase is Phase.LIVE:
            self._wind_down()
        if self.phase is Phase.ENDING and not self._crew.members:
            self._conclude(now)
        if self.phase is Phase.IDLE and self.goal is Goal.RUN:
            self.phase = Phase.LIVE
            self._reach_size(now)
        out, self._crew.out = self._crew.out, []
        return out

    def _reach_size(self, now: Moment) -> None:
        crew = self._crew
        if crew.finished:
            self._check_all_return(now)
            return
        fit = crew.fit(self._order.places)
        crew.dismiss(*fit.useless)
        newcomers = [*fit.useful, *(crew.spawn(node, now.awake_s) for node in fit.missing)]
        if crew.forming:
            return
        if newcomers:
            self._take_in(fit.stay, newcomers, now)
        elif len(fit.stay) < len(crew.formed):
            self._form(fit.stay, now)
        elif self._order.batch != self._told_batch:
            self._told_batch = self._order.batch
            if self.spec.follows_batch and self._order.batch is not None:
                self._tell_group(SetBatch(as_order(self._order.batch)))

    def _take_in(self, stay: tuple[str, ...], newcomers: list[Member], now: Moment) -> None:
        formed = self._crew.formed
        since_s = now.awake_s - self._rules.yield_s
        if all(member.store for member in newcomers):
            self._form((*(stay or formed), *(member.id for member in newcomers)), now)
        elif len(stay) < len(formed) and any(not m.seated and m.asked_s <= since_s for m in newcomers):
            if stay:
                self._form(stay, now)
            else:
                self._kill_at_s = now.awake_s + self._rules.park_s
                self._wind_down()

    def _form(self, order: tuple[str, ...], now: Moment) -> None:
        self._told_batch = self._order.batch
        self._stepped_s = now.awake_s
        batch = as_order(self._order.batch) if self.spec.follows_batch and self._order.batch else None
        self._crew.form(order, self._order.nodes(len(order)), batch)

    def _has_formed(self, now: Moment) -> None:
        self._crew.has_formed(now.awake_s + self._rules.grace_s)
        self._stepped_s = now.awake_s
        asked_s = self._order.asked_s
        if asked_s is not None and self._crew.on(self._crew.formed) == self._order.places:
            self._resize_s, self._order.asked_s = now.t_s - asked_s, None

    def _wind_down(self) -> None:
        self._crew.dismiss(*self._crew.newcomers())
        if not self._crew.formed:
            self._end_all()
        elif not self._crew.forming:
            self.phase = Phase.ENDING
            self._tell_group(FinishEpoch() if self.goal is Goal.EPOCH else Park())

    def _conclude(self, now: Moment) -> None:
        """Nothing of this incarnation is left."""
        self.phase = Phase.IDLE
        self._crew.disband()
        self._kill_at_s = math.inf
        self.goal = Goal.REST if self.goal is Goal.EPOCH else self.goal
        cause = self._losses.take()
        if cause is None or self.goal is Goal.OVER:
            return
        if self.goal is Goal.REST:
            self._note(f"while it left: {cause.text}", now, NoteKind.NOT_SAVED, self._log)
            return
        verdict = self._losses.verdict(
            cause, self._account.reached, job_id=self.job.id, t_s=now.t_s, log=self._log
        )
        if isinstance(verdict, JobFailed):
            self.goal = Goal.OVER
            self._hold_no_more(now)
        self._emit(verdict)

    # Messages of workers

    def _beat(self, member: Member, beat: Beat, now: Moment) -> None:
        if beat.steps != member.steps and not member.outgoing:
            member.steps = beat.steps
            self._stepped_s = now.awake_s

    def _take(self, member: Member, message: FromWorker, now: Moment) -> None:
        match message:
            case Ready():
                member.store = message.store
            case Formed() if self._crew.forms(member, message.generation):
                self._has_formed(now)
            case Described():
                self.described = message
            case Note():
                self._note(message.text, now)

    def _take_last_word(self, member: Member, message: Finished | Failed | Left, now: Moment) -> None:
        match message:
            case Finished() if not member.outgoing:
                self._finish(member, now)
            case Failed():
                self._lost(member, Cause(Blame.RAISED, message.traceback, message.final), now)
            case Left() if self.spec.describe_only and not member.outgoing:
                self._finish(member, now)
            case Left() if self.phase is Phase.LIVE and not member.leaving:
                self._lost(member, Cause(Blame.BYSTANDER, f"a worker left: {message.why}"), now)

    def _hold_no_more(self, now: Moment) -> None:
        """Report what was held back: the job or the run ends, and no later report will carry it."""
        self._order.holds_reports = False
        self._tell(now)

    def _tell(self, now: Moment) -> None:
        events = self._account.tell(t_s=now.t_s, resize_s=self._resize_s)
        if events:
            self._resize_s = None
            self._crew.out.extend(map(Emit, events))

    def _tell_last(self, now: Moment) -> None:
        """Report everything that is left: the job is done."""
        self._tell(now)

    def _finish(self, member: Member, now: Moment) -> None:
        """A worker has returned. The job is done when all workers of the group have returned."""
        crew = self._crew
        if crew.formed and not crew.has(member):
            self._lost(member, Cause(Blame.BYSTANDER, "a new worker returned without training"), now)
            return
        crew.finished.add(member.id)
        if crew.finished.issuperset(crew.formed or crew.members):
            self.goal = Goal.OVER
            self.phase = Phase.ENDING
            self._kill_at_s = now.awake_s + self._rules.grace_s
            crew.dismiss(*(one for one in crew.members.values() if one.id not in crew.finished))
            self._tell_last(now)
            self._emit(JobFinished(t_s=now.t_s, job_id=self.job.id))

    # Losses

    def _lost(self, member: Member, cause: Cause, now: Moment) -> None:
        crew = self._crew
        if member.outgoing or self.goal is Goal.OVER:
            return
        if self.phase is Phase.LIVE and crew.formed and not crew.has(member):
            self._lost_newcomer(member, cause, now)
            return
        self._losses.causes.append(cause)
        self._kill_at_s = min(self._kill_at_s, now.awake_s + self._rules.grace_s)
        if self.phase is Phase.LIVE:
            self.phase = Phase.ENDING
            crew.dismiss(*(crew.newcomers() if crew.formed else crew.members.values()))

    def _lost_newcomer(self, member: Member, cause: Cause, now: Moment) -> None:
        self._crew.dismiss(member)
        if self._losses.does_without(cause):
            self._order.places = self._crew.on(self._crew.group)
            size = self._order.size
            self._order.asked_s = self._order.asked_s if self._crew.forming else None
            text = f"its number of workers stays {size}, as no more could be started: {cause.text}"
            self._note(text, now, log=self._log)

    def _give_up(self, members: list[Member], why: str, now: Moment) -> None:
        for member in members:
            if not (member.spoke or member.outgoing):
                self._lost(member, Cause(Blame.SILENT, why), now)
            self._crew.kill(member)

    def _check_all_return(self, now: Moment) -> None:
        member = self._crew.left_behind()
        if member is not None:
            self._lost(member, Cause(Blame.RAISED, "some workers finished while others still train"), now)

    def _hangs(self, now: Moment) -> bool:
        trains = self.phase is Phase.LIVE and bool(self._crew.group)
        finishing = self.phase is Phase.ENDING and self.goal is Goal.EPOCH
        return (trains or finishing) and now.awake_s - self._stepped_s > self._rules.hang_s

    def _kill_late(self, now: Moment) -> None:
        if not self._losses.causes and self.goal is Goal.REST:
            text = f"{KILLED}; it continues from its last checkpoint, or starts over if it has none"
            self._note(text, now, NoteKind.NOT_SAVED)
        self._kill_all()

    # Helpers

    def _end_all(self) -> None:
        self.phase = Phase.ENDING
        self._crew.dismiss(*self._crew.members.values())

    def _kill_all(self) -> None:
        self._kill_at_s = math.inf
        self.phase = Phase.ENDING
        self._crew.kill(*self._crew.members.values())

    def _tell_group(self, message: ToWorker) -> None:
        """Tell rank 0, which agrees with the others on a step."""
        if self._crew.group:
            self._crew.out.append(Send(self._crew.group[0], message))

    def _note(self, text: str, now: Moment, about: NoteKind | None = None, log: str = "") -> None:
        self._emit(JobNoted(t_s=now.t_s, job_id=self.job.id, text=text, about=about, log=log))

    def _emit(self, event: Event) -> None:
        self._crew.out.append(Emit(event))
