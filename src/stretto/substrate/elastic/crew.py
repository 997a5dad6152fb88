"""Who belongs to a gang: the group that trains, the one it is to become, newcomers, those on the way out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.substrate.elastic.effects import Effect, End, Kill, Send, Spawn
from stretto.wire.messages import BatchOrder, Form, Leave


class Goal(Enum):
    """What a gang is to come to."""

    REST = auto()
    """Nothing runs; the job may be started again."""
    RUN = auto()
    EPOCH = auto()
    """Rest, once the present epoch is over."""
    OVER = auto()
    """Nothing runs, for good."""


class Phase(Enum):
    """Where an incarnation of a gang is."""

    IDLE = auto()
    LIVE = auto()
    ENDING = auto()


@dataclass(slots=True)
class Order:
    """What was last asked for."""

    allocation: Allocation = NOTHING
    batch: BatchChoice | None = None
    places: Counter[str] = field(default_factory=Counter)
    """Workers on each node: as many as were allocated, unless so many could not be started."""
    asked_s: float | None = None
    """When the start or resize that is under way was asked for."""
    holds_reports: bool = False
    """The job counts as standing still."""

    @property
    def size(self) -> int:
        return self.places.total()

    def nodes(self, workers: int) -> int:
        """On how many nodes so many workers are."""
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
    """It has a slot."""
    led: bool = False
    """It is or was the first of a group, and what it reports counts."""
    store: str = ""
    """Where it can be met; empty until it is ready."""
    heard_s: float | None = None
    """When it last gave a sign of life; None before it runs."""
    steps: int = 0
    leaving: bool = False
    """Not part of the group that is being formed."""
    outgoing: bool = False
    """Nothing is expected of it any more."""
    spoke: bool = False
    """It said its last word."""
    kill_at_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Fit:
    """How a crew compares with the places it is to fill."""

    stay: tuple[str, ...]
    """Of the group, by rank: those that are where they should be."""
    useful: tuple[Member, ...]
    """Newcomers that fill the other places, the ready ones first."""
    useless: tuple[Member, ...]
    missing: tuple[str, ...]
    """Nodes on which another one must be started; as often as there are places."""


@dataclass(slots=True)
class Crew:
    """The members of one incarnation, and what is to be done to them."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)
    """All that are not gone, those that wait for a slot included."""
    formed: tuple[str, ...] = ()
    """The group that trains, by rank."""
    forming: tuple[str, ...] = ()
    """The group it has been told to become."""
    finished: set[str] = field(default_factory=set)
    generation: int = -1
    out: list[Effect] = field(default_factory=list)
    _born: int = 0

    @property
    def group(self) -> tuple[str, ...]:
        """The group that trains as far as it can be told."""
        return self.forming or self.formed

    def has(self, member: Member) -> bool:
        """Whether it is in a group, rather than new."""
        return member.id in self.formed or member.id in self.forming

    def newcomers(self) -> list[Member]:
        """Those on their way into the group, the ready ones first."""
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
        """The places these have, as far as they are not gone: some leave before the others have formed."""
        return Counter(self.members[one].node for one in worker_ids if one in self.members)

    def silent(self, since_s: float) -> list[Member]:
        """Those that ought to have been heard of since then."""
        return [
            member
            for member in self.members.values()
            if member.heard_s is not None
            and member.heard_s < since_s
            and not (member.spoke or member.outgoing)
        ]

    def left_behind(self) -> Member | None:
        """One that is to train where others returned: before there is a group, all return or none."""
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
        """Tell members to become this group, and the others of the present one to leave."""
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
        """Whether this one says for the group that is being formed that it trains."""
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
        """Nobody is left."""
        self.formed = self.forming = ()
        self.finished.clear()
