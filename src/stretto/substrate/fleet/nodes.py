"""The nodes of a fleet as data: kinds, nodes seen, pending or present, and orders for a launcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.core.cluster import Node
from stretto.core.events import Event


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A type of node that can be launched."""

    instance: str
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """A node that is alive."""

    key: str
    """Identifies one life of the node: it has another key after a restart."""
    name: str
    slots: int
    instance: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class PendingNode:
    """A node that was requested and has not come."""

    node: Node
    asked_s: float
    due_s: float
    launched_s: float | None = None


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node that the run has."""

    node: Node
    key: str
    """Empty until it is seen."""
    draining: bool = False
    leaving: bool = False
    """Whether it is to be given back as soon as its workers have left."""

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
    """End a node, present or on the way."""

    name: str
    key: str = ""
    """The node's key, if it has been present."""


NodeOrder = LaunchNode | ReleaseNode


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """Why a launch failed."""

    why: str
    log: str = ""
    """The file with its output, if it is kept."""

    @property
    def words(self) -> str:
        return f"{self.why} (log: {self.log})" if self.log else self.why


@dataclass(slots=True)
class FleetStep:
    """The result of one input: orders to carry out, then events to report, in this order."""

    orders: list[NodeOrder] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
