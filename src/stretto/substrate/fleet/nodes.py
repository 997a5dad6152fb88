"""What is seen of the nodes of a cluster, and what is to be done about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stretto.core.cluster import Node
from stretto.core.events import Event

START_S = 600.0
"""A node that is not here so long after it was asked for is not waited for any more."""

Resource = Literal["GPU", "CPU"]
"""What of a node is a slot."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A type of node that can be launched."""

    instance: str
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """A node that is alive."""

    key: str
    """Of this life of it: another after a restart."""
    name: str
    slots: int
    instance: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class PendingNode:
    """A node that was asked for."""

    node: Node
    asked_s: float
    due_s: float
    launched_s: float | None = None


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node that is there."""

    node: Node
    key: str
    """Empty: it was not seen yet."""
    draining: bool = False
    leaving: bool = False
    """It is not wanted any more, and somebody is still there."""

    @property
    def is_counted_on(self) -> bool:
        return bool(self.node.instance) and not self.draining and not self.leaving


@dataclass(frozen=True, slots=True)
class LaunchNode:
    """Bring up a node under this name."""

    name: str
    instance: str


@dataclass(frozen=True, slots=True)
class ReleaseNode:
    """Let go of a node, or of one that is on the way; whatever there is of it."""

    name: str
    key: str = ""
    """Of the node, if it is or was here."""


NodeOrder = LaunchNode | ReleaseNode


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """Why a launch came to nothing."""

    why: str
    log: str = ""
    """Where all that it said is, if that is kept."""

    @property
    def words(self) -> str:
        return f"{self.why} (log: {self.log})" if self.log else self.why


@dataclass(slots=True)
class FleetStep:
    """What follows from something: in this order, first what is to be done, then what is to be told."""

    orders: list[NodeOrder] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
