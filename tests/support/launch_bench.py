"""Nodes that are launched, in a cluster that is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from live_processes import eventually
from stretto.core.cluster import Node, Wish
from stretto.core.events import Decided, Event, NodeAdded, NodeLaunched
from stretto.core.resources import Resources
from stretto.substrate.fleet.nodes import NodeKind
from stretto.substrate.ray.fleet import NodePool, RayFleet
from stretto.substrate.ray.launch import AutoscalerLauncher
from stretto.substrate.ray.launch_commands import CommandLauncher
from stretto.substrate.ray.nodes import RayNode

Told = TypeVar("Told")

TWO = NodeKind("two", 2)


def wish(count: int, *release: str) -> Wish:
    return Wish((("two", count),), release)


def alive(name: str, instance: str = "") -> RayNode:
    return RayNode(ray_id=f"id-{name}", name=name, host="h", slots=2, instance=instance, draining=False)


def unseen(launcher: CommandLauncher | AutoscalerLauncher | NodePool, *there: RayNode) -> RayFleet:
    """A fleet in a cluster that is made up."""
    return RayFleet(launcher, resource="GPU", late_s=0.1, read=lambda _: there, connected=lambda: True)


def changing(launcher: CommandLauncher, there: list[RayNode], *, late_s: float = 0.1) -> RayFleet:
    """A fleet in a cluster that is made up anew at every look. What it waits for longer than 10 s is late."""
    return RayFleet(
        launcher,
        resource="GPU",
        start_s=10.0,
        look_s=0.02,
        late_s=late_s,
        read=lambda _: list(there),
        connected=lambda: True,
    )


def two_came() -> list[Event]:
    """The record of a run that has two nodes."""
    nodes = [Node(f"two-{number}", Resources(gpu=2), "two") for number in (1, 2)]
    return [
        Decided(t_s=0.0, policy="t", instructions=(), reasons={}, memory=None, wish=wish(2)),
        *(NodeLaunched(t_s=1.0, node=node) for node in nodes),
        *(NodeAdded(t_s=2.0, node=node) for node in nodes),
    ]


def collected(more: Callable[[], Sequence[Told]], count: int) -> list[Told]:
    """What is said until there are so many things."""
    found: list[Told] = []

    def enough() -> bool:
        found.extend(more())
        return len(found) >= count

    assert eventually(enough), found
    return found
