"""A gang without processes: workers that answer when they are told to, on a machine with few slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from local_bench import BATCH, job_of
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.events import Event
from stretto.core.instructions import Action, Instruction
from stretto.substrate.elastic.effects import (
    Effect,
    Emit,
    End,
    Kill,
    Moment,
    Rules,
    Send,
    Spawn,
    TrainingJob,
    WorkerExit,
)
from stretto.substrate.elastic.gang import Gang
from stretto.substrate.elastic.losses import Losses
from stretto.substrate.elastic.recovery import Failures
from stretto.substrate.elastic.reports import TrainingAccount
from stretto.substrate.elastic.training import TrainingGang
from stretto.substrate.local.slots import SlotPool, Slots
from stretto.wire.messages import (
    Beat,
    EpochEnd,
    FinishEpoch,
    Form,
    Formed,
    FromWorker,
    Leave,
    Left,
    LetEnd,
    Park,
    Ready,
    Report,
    Saved,
    ToWorker,
)

RULES = Rules(grace_s=10.0, park_s=60.0, retries=2, heartbeat_s=30.0, hang_s=600.0)


@dataclass(slots=True)
class Puppet:
    """One worker, which does nothing by itself."""

    node: str = ""
    placed: bool = False
    ready: bool = False
    dying: bool = False
    told: list[ToWorker] = field(default_factory=list)

    @property
    def form(self) -> Form | None:
        forms = [message for message in self.told if isinstance(message, Form)]
        return forms[-1] if forms else None

    @property
    def leaves(self) -> bool:
        return any(isinstance(message, Leave) for message in self.told)


class Theatre:
    """Plays the engine, the slots and the workers, and checks what must always hold."""

    def __init__(self, slots: int = 0, rules: Rules = RULES, nodes: Mapping[str, int] | None = None) -> None:
        """With slots that are all one, or with so many on each of several nodes."""
        spec = TrainingJob(entry="e", config={}, epochs=6, metric="accuracy", follows_batch=True)
        self.account = TrainingAccount(job_of("a"), "accuracy")
        self.gang: Gang = TrainingGang(
            job_of("a"),
            spec,
            rules,
            "log",
            account=self.account,
            losses=Losses(rules.retries, Failures()),
            places_of=lambda allocation: (
                Counter(dict(allocation.workers)) if nodes else Counter({"": allocation.worker_count})
            ),
        )
        self.slots = dict(nodes or {"": slots})
        self.pools = {node: SlotPool(Slots(("",) * count)) for node, count in self.slots.items()}
        self.puppets: dict[str, Puppet] = {}
        self.events: list[Event] = []
        self.sent: list[tuple[str, ToWorker]] = []
        self.trains: Form | None = None
        """What the leader was told when it last said that the group trains."""
        self.now = Moment(0.0, 0.0)
        self.epoch = 0
        self._number = 0

    # What the controller does

    def tell(self, action: Action, workers: int | Mapping[str, int] = 0, batch: BatchChoice = BATCH) -> None:
        self._number += 1
        allocation = on_nodes({"local": workers} if isinstance(workers, int) else workers)
        told = Instruction(self._number, action, "a", allocation, batch)
        self._do(self.gang.instruct(told, self.now))

    # What the machine does

    def place(self) -> None:
        for worker_id, _ in [grant for pool in self.pools.values() for grant in pool.grants()]:
            self.puppets[worker_id].placed = True
            self._do(self.gang.seated(worker_id))
            self._do(self.gang.born(worker_id, self.now))

    def die(self, worker_id: str, code: int = -9) -> None:
        self.pools[self.puppets.pop(worker_id).node].give_back(worker_id)
        self._do(self.gang.gone(worker_id, WorkerExit(code), self.now))

    def wait(self, seconds: float, *, beating: bool = True) -> None:
        self.now = Moment(self.now.t_s + seconds, self.now.awake_s + seconds)
        for worker_id in self.placed() if beating else []:
            self.say(worker_id, Beat(round(self.now.awake_s * 10)))
        self._do(self.gang.tick(self.now))

    def bury(self) -> None:
        """Those who were told to go, go."""
        for worker_id in [i for i, puppet in self.puppets.items() if puppet.dying]:
            self.die(worker_id, 0)

    # What workers do

    def placed(self) -> list[str]:
        return [i for i, puppet in self.puppets.items() if puppet.placed and not puppet.dying]

    def warm_up(self, worker_id: str) -> None:
        self.puppets[worker_id].ready = True
        self.say(worker_id, Ready(f"store of {worker_id}"))

    def group(self) -> list[str]:
        """Those who were told to be one group, if all of them are there."""
        told = {i: self.puppets[i].form for i in self.placed() if not self.puppets[i].leaves}
        newest = max((form.generation for form in told.values() if form), default=-1)
        members = {form.rank: i for i, form in told.items() if form and form.generation == newest}
        world = next((form.world for form in told.values() if form and form.generation == newest), 0)
        return [members[rank] for rank in range(world)] if len(members) == world else []

    def meet(self) -> None:
        """The group forms, and those who are not part of it leave."""
        group = self.group()
        if not group:
            return
        form = self.puppets[group[0]].form
        assert form is not None
        if self.trains is None or form.generation > self.trains.generation:
            for worker_id in [i for i in self.placed() if self.puppets[i].leaves]:
                self.say(worker_id, Left("not needed"))
                self.die(worker_id, 0)
            self.trains = form
            self.say(group[0], Formed(form.generation))

    def obey(self) -> None:
        """A group that was told to leave does so, if it has formed."""
        group = self.group()
        if group and any(
            isinstance(message, Park | FinishEpoch | LetEnd) for message in self.puppets[group[0]].told
        ):
            for worker_id in group:
                self.say(worker_id, Left("parked", saved=True))
                self.die(worker_id, 0)

    def report(self, epoch: int | None = None) -> None:
        self.epoch = self.epoch + 1 if epoch is None else epoch
        group = self.group()
        if group:
            end = EpochEnd(epoch=self.epoch, values={"accuracy": 0.5, "loss": 1.0}, epoch_s=1.0)
            self.say(group[0], Report(progress=self.epoch, epoch=self.epoch, steps=1, ends=(end,)))
            self.say(group[0], Saved(progress=self.epoch, path="checkpoint"))

    def say(self, worker_id: str, message: FromWorker) -> None:
        if worker_id in self.puppets:
            self._do(self.gang.hear(worker_id, message, self.now))

    def get_going(self) -> None:
        """Everybody there is to be had warms up and meets."""
        self.place()
        for worker_id in self.placed():
            if not self.puppets[worker_id].ready:
                self.warm_up(worker_id)
        self.meet()

    def cooperate(self) -> None:
        """Everybody does what is asked until nothing is left to do; time passes."""
        for _ in range(20):
            self.bury()
            self.get_going()
            self.obey()
            self.wait(5.0)

    def lose_node(self, node: str) -> None:
        """Whoever is there is gone without a word."""
        self._do(self.gang.strand(node, self.now))
        for worker_id in [i for i, puppet in self.puppets.items() if puppet.node == node]:
            self.pools[node].withdraw(worker_id)
            self.die(worker_id)

    def nodes(self) -> dict[str, int]:
        """Where those are who train."""
        return dict(Counter(self.puppets[worker_id].node for worker_id in self.group()))

    def started(self, workers: int | Mapping[str, int] = 1) -> None:
        """A gang that trains."""
        self.tell(Action.START, workers)
        self.cooperate()

    def messages(self, kind: type[ToWorker]) -> list[ToWorker]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    # What is asked of the machine

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)
        assert all(self.pools[node].held <= count for node, count in self.slots.items())
        assert set(self.gang.workers) == set(self.puppets), "the gang lost sight of a worker"

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Spawn():
                self.puppets[effect.worker_id] = Puppet(effect.node)
                self.pools[effect.node].ask(effect.worker_id)
            case End() | Kill():
                if effect.worker_id in self.puppets:
                    puppet = self.puppets[effect.worker_id]
                    puppet.dying = True
                    if self.pools[puppet.node].withdraw(effect.worker_id):
                        puppet.placed = False
            case Send():
                self.sent.append((effect.worker_id, effect.message))
                if effect.worker_id in self.puppets:
                    self.puppets[effect.worker_id].told.append(effect.message)
                if isinstance(effect.message, Form):
                    self._check_form(effect.message)
            case Emit():
                self.events.append(effect.event)

    def _check_form(self, form: Form) -> None:
        """A new group may be formed only when the last one trains, or is gone."""
        older = [p.form for p in self.puppets.values() if p.form and p.form.generation < form.generation]
        assert all(self.trains is not None and old.generation <= self.trains.generation for old in older)
