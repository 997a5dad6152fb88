"""Which nodes a run has, had, asked for and was refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stretto.core.cluster import Node, Wish
from stretto.core.events import (
    Decided,
    Event,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunPaused,
    RunStarted,
)

HOPELESS = 6
"""After this many equal refusals in a row, no node is expected to come.

The policy decides how far apart its requests are, so it decides how long a temporary cause may last.
"""
_CUT = "\N{HORIZONTAL ELLIPSIS}"
"""Marks a word before which text was cut off."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """How many requests in a row were refused for the same reason, while no node ever came."""

    times: int = 0
    instance: str = ""
    why: str = ""
    """The last reason."""
    last_s: float | None = None
    """The time of the last refusal."""
    came: bool = False
    """A node came once: others can come too, so refusals are not counted any more."""

    @property
    def hopeless(self) -> bool:
        return self.times >= HOPELESS

    def arrived(self) -> Refusals:
        return Refusals(came=True)

    def with_one_more_try(self) -> Refusals:
        """The same refusals with one more try: after a resume the cause may have been fixed."""
        return replace(self, times=min(self.times, HOPELESS - 1))

    def after(self, refused: NodeRefused, *, awaits: bool) -> Refusals:
        """Refusals at the same time count once. None counts while other nodes are awaited."""
        if awaits or self.came or refused.t_s == self.last_s:
            return self
        alike = refused.instance == self.instance and _are_alike(refused.why, self.why)
        times = self.times + 1 if alike else 1
        return Refusals(times, refused.instance, refused.why, refused.t_s)


def end_of(text: str, letters: int) -> str:
    """The last words of a text, about this many letters, with a mark if something is left out."""
    words = " ".join(text.split())
    if len(words) <= letters:
        return words
    end = words[-letters:]
    _, space, whole = end.partition(" ")
    return f"{_CUT} {whole}" if space else f"{_CUT}{end}"


def _are_alike(why: str, other: str) -> bool:
    """Whether two reasons may be the same, although their beginnings may be cut off."""
    (head, tail), (other_head, other_tail) = _gist(why), _gist(other)
    if tail is None or other_tail is None:
        return _has(head, other_head, other_tail) if tail is None else _has(other_head, head, tail)
    shared = min(len(tail), len(other_tail))
    return head == other_head and tail[len(tail) - shared :] == other_tail[len(other_tail) - shared :]


def _has(words: list[str], head: list[str], tail: list[str] | None) -> bool:
    """Whether the words begin with the head and end with the tail; without a tail, equal the head."""
    if tail is None:
        return words == head
    rest = words[len(head) :]
    return words[: len(head)] == head and len(rest) >= len(tail) and rest[len(rest) - len(tail) :] == tail


def _gist(why: str) -> tuple[list[str], list[str] | None]:
    """The words before the cut and after it; None if nothing was cut.

    Words with digits are left out: names of nodes, times and ids differ from one refusal to the next.
    """
    head: list[str] = []
    tail: list[str] | None = None
    for word in why.split():
        if word.startswith(_CUT):
            tail = []
        elif not any(letter.isdigit() for letter in word):
            (head if tail is None else tail).append(word)
    return head, tail


@dataclass(slots=True)
class NodeRecord:
    """The nodes and requests of a run now, folded from its events."""

    here: dict[str, Node] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    coming: dict[str, tuple[Node, float]] = field(default_factory=dict)
    """Nodes that are on the way, with their launch times."""
    called_off: list[str] = field(default_factory=list)
    """Nodes that were on the way when the run was paused, and whose end is not known."""
    wish: Wish = field(default_factory=lambda: Wish(()))
    """The last request, without nodes that were refused or lost since; with releases not confirmed yet."""
    refusals: Refusals = field(default_factory=Refusals)
    names: int = 0
    """The highest number in the name of a node."""

    @property
    def rented(self) -> tuple[str, ...]:
        """The launched nodes that may still be up."""
        return (*(node.id for node in self.here.values() if node.instance), *self.coming)

    @staticmethod
    def of(history: Iterable[Event]) -> NodeRecord:
        record = NodeRecord()
        for event in history:
            record._apply(event)
        return record

    def _apply(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.here = {node.id: node for node in event.nodes}
            case NodeLaunched():
                self.coming[event.node.id] = event.node, event.t_s
                self._count(event.node.id)
            case NodeAdded():
                self._settle(event.node.id)
                self.draining.discard(event.node.id)
                self.here[event.node.id] = event.node
                if event.node.instance:
                    self.refusals = self.refusals.arrived()
            case NodeLost() | NodeReleased():
                self._miss(event.node_id)
                self._settle(event.node_id)
                self.draining.discard(event.node_id)
                self.here.pop(event.node_id, None)
            case NodeDraining():
                self._miss(event.node_id)
                self.draining.add(event.node_id)
            case NodeRefused():
                self.wish = self.wish.less(event.instance, event.count)
                self.refusals = self.refusals.after(event, awaits=self._awaits)
            case Decided() if event.wish is not None:
                unseen = [node_id for node_id in self.wish.release if node_id in self.here]
                self.wish = Wish(event.wish.nodes, (*unseen, *event.wish.release))
            case RunPaused():
                self.called_off += self.coming
                self.coming.clear()
            case _:
                pass

    def _settle(self, node_id: str) -> None:
        self.coming.pop(node_id, None)
        if node_id in self.called_off:
            self.called_off.remove(node_id)

    @property
    def _awaits(self) -> bool:
        """Whether nodes are on the way or requested."""
        return bool(self.coming) or any(count for _, count in self.wish.nodes)

    def _miss(self, node_id: str) -> None:
        """Take a lost node off the request, unless the run released it."""
        node = self.here.get(node_id)
        if node is not None and node_id not in self.draining and node_id not in self.wish.release:
            self.wish = self.wish.less(node.instance, 1)

    def _count(self, name: str) -> None:
        number = name.rpartition("-")[2]
        if number.isdigit():
            self.names = max(self.names, int(number))


@dataclass(slots=True)
class NodeStay:
    """One stay of a node, from the beginning of its start-up until it went."""

    node: Node
    start_s: float
    ready_s: float
    """When it was ready; infinite if it never was."""
    end_s: float = math.inf
    """Infinite while it is up."""
    came: bool = True
    """It came during the run; otherwise it was there at the start."""


class NodeStays:
    """A fold: when each node began to start, was ready and went."""

    def __init__(self) -> None:
        self.stays: list[NodeStay] = []
        self._here: dict[str, NodeStay] = {}

    def observe(self, event: Event) -> None:
        """Add an event."""
        match event:
            case RunStarted():
                for node in event.nodes:
                    stay = self._come(node, event.t_s)
                    stay.ready_s, stay.came = event.t_s, False
            case NodeLaunched() if event.node.id not in self._here:
                self._come(event.node, event.t_s)
            case NodeAdded():
                stay = self._here.get(event.node.id) or self._come(event.node, event.t_s - event.init_s)
                stay.node, stay.ready_s = event.node, event.t_s
            case NodeLost() | NodeReleased() if event.node_id in self._here:
                self._here.pop(event.node_id).end_s = event.t_s
            case _:
                pass

    def _come(self, node: Node, t_s: float) -> NodeStay:
        stay = NodeStay(node, t_s, math.inf)
        self.stays.append(stay)
        self._here[node.id] = stay
        return stay
