"""The members of a gang: the group that trains, the group that forms, newcomers and leavers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.substrate.elastic.effects import Effect, End, Kill, Send, Spawn
from stretto.wire.messages import BatchOrder, Form, Leave


class Goal(Enum):
    """The state that a gang works towards."""

    REST = auto()
    """Nothing runs; the job may start again."""
    RUN = auto()
    EPOCH = auto()
    """Rest when the present epoch is over."""
    OVER = auto()
    """Nothing runs, and never will again."""


class Phase(Enum):
    """The phase of an incarnation of a gang."""

    IDLE = auto()
    LIVE = auto()
    ENDING = auto()


@dataclass(slots=True)
class GangOrder:
    """The allocation and batch of the last instruction."""

    allocation: Allocation = NOTHING
    batch: BatchChoice | None = None
    places: Counter[str] = field(default_factory=Counter)
    """Workers on each node: those allocated, or fewer if not all could start."""
    asked_s: float | None = None
    """When the present start or resize was asked for; None if there is none."""
    holds_reports: bool = False
    """Whether reports wait, as the job counts as parked."""

    @property
    def size(self) -> int:
        return self.places.total()

    def nodes(self, workers: int) -> int:
        """The number of nodes that this many workers are on."""
        return min(len(self.allocation.nodes), workers)


def as_order(batch: BatchChoice) -> BatchOrder:
    return BatchOrder(batch.atomic, batch.accumulation)


@dataclass(slots=True)
class Member:
    id: str
    node: str
    asked_s: float
    """When it was asked for."""
    seated: bool = False
    """Whether it has a slot."""
    led: bool = False
    """Whether it is or was rank 0 of a group, so that its reports count."""
    store: str = ""
    """The address of its store; empty until it is ready."""
    heard_s: float | None = None
    """When its last message came; None before it runs."""
    steps: int = 0
    leaving: bool = False
    """Whether it is not part of the group that forms."""
    outgoing: bool = False
    """Whether it was told to end."""
    spoke: bool = False
    """Whether it sent its last message."""
    kill_at_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Fit:
    """How the members compare with the places that they are to fill."""

    stay: tuple[str, ...]
    """Members of the group that can stay, by rank."""
    useful: tuple[Member, ...]
    """Newcomers that fill other places, the ready ones first."""
    useless: tuple[Member, ...]
    missing: tuple[str, ...]
    """Nodes on which a worker must still start, once for each place."""


@dataclass(slots=True)
class Crew:
    """The members of one incarnation, and the effects on them."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)
    """All that are not gone, including those that wait for a slot."""
    formed: tuple[str, ...] = ()
    """The group that trains, by rank."""
    forming: tuple[str, ...] = ()
    """The group that it was told to form."""
    finished: set[str] = field(default_factory=set)
    generation: int = -1
    out: list[Effect] = field(default_factory=list)
    _born: int = 0

    @property
    def group(self) -> tuple[str, ...]:
        """The group that forms, or else the one that trains."""
        return self.forming or self.formed

    def has(self, member: Member) -> bool:
        """Whether it is in a group, so not a newcomer."""
        return member.id in self.formed or member.id in self.forming

    def newcomers(self) -> list[Member]:
        """Members that are not in a group yet, the ready ones first."""
        new = [m for m in self.members.values() if not (self.has(m) or m.outgoing or m.spoke)]
        return sorted(new, key=lambda member: not member.store)

    def fit(self, places: Counter[str]) -> Fit:
        left = Counter(places)

        def fills(member: Member) -> bool:
            left[member.node] -= 1
            return left[member.node] >= 0

        stay = tuple(worker_id for worker_id in self.group if fills(self.members[worker_id]))
        left = +left
        newcomers = [(member, fills(member)) for member in self.newcomers()]
        return Fit(
            stay,
            tuple(member for member, is_useful in newcomers if is_useful),
            tuple(member for member, is_useful in newcomers if not is_useful),
            tuple((+left).elements()),
        )

    def on(self, worker_ids: tuple[str, ...]) -> Counter[str]:
        """The places of these members, except those that are gone."""
        return Counter(self.members[one].node for one in worker_ids if one in self.members)

    def silent(self, since_s: float) -> list[Member]:
        """Members without a message since then."""
        return [
            member
            for member in self.members.values()
            if member.heard_s is not None
            and member.heard_s < since_s
            and not (member.spoke or member.outgoing)
        ]

    def left_behind(self) -> Member | None:
        """A ready member that did not return, but others did. Without a group, all or none must return."""
        waiting = [member for member in self.members.values() if not member.spoke]
        stay = not self.group and all(member.store for member in waiting)
        return waiting[0] if waiting and stay else None

    def spawn(self, node: str, asked_s: float) -> Member:
        self._born += 1
        member = Member(f"{self.name}.{self._born}", node, asked_s)
        self.members[member.id] = member
        self.out.append(Spawn(member.id, node))
        return member

    def form(self, order: tuple[str, ...], nodes: int, batch: BatchOrder | None) -> None:
        """Tell members to form this group, and the others to leave."""
        self.generation += 1
        self.forming = order
        self.members[order[0]].led = True
        stores: dict[str, list[str]] = defaultdict(list)
        for worker_id in order:
            stores[self.members[worker_id].node].append(self.members[worker_id].store)
        for rank, worker_id in enumerate(order):
            form = Form(
                generation=self.generation,
                rank=rank,
                world=len(order),
                nodes=nodes,
                store=self.members[order[0]].store,
                share_state=not set(order) <= set(self.formed),
                batch=batch,
                neighbours=tuple(stores[self.members[worker_id].node]),
            )
            self.out.append(Send(worker_id, form))
        for worker_id in self.formed:
            if worker_id not in order:
                self.members[worker_id].leaving = True
                self.out.append(Send(worker_id, Leave(self.generation)))

    def forms(self, member: Member, generation: int) -> bool:
        """Whether this member leads the group that forms in this generation."""
        return member.id in self.forming[:1] and generation == self.generation

    def has_formed(self, leavers_killed_at_s: float) -> None:
        self.formed, self.forming = self.forming, ()
        for member in self.members.values():
            if member.leaving and not member.outgoing:
                member.outgoing = True
                member.kill_at_s = leavers_killed_at_s

    def dismiss(self, *members: Member) -> None:
        for member in members:
            if not member.outgoing:
                member.outgoing = True
                self.out.append(End(member.id))

    def kill(self, *members: Member) -> None:
        for member in members:
            member.outgoing = True
            member.kill_at_s = math.inf
            self.out.append(Kill(member.id))

    def disband(self) -> None:
        """No member is left."""
        self.formed = self.forming = ()
        self.finished.clear()
