"""The machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.core.resources import Resources


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster."""

    id: str
    capacity: Resources
    instance: str = ""
    """The type it was rented as; empty for a node that is simply there."""

    @property
    def gpus(self) -> int:
        return int(self.capacity.gpu)


@dataclass(frozen=True, slots=True)
class Wish:
    """The cluster a policy wants: so many nodes of each instance type, once some are given back.

    Wishing the same twice changes nothing.
    """

    nodes: tuple[tuple[str, int], ...]
    """How many of which instance type, those that are still to come included."""
    release: tuple[str, ...] = ()
    """Nodes to give back; nothing runs on them any more."""

    def count(self, instance: str) -> int:
        """How many nodes of a type it is for."""
        return dict(self.nodes).get(instance, 0)

    def less(self, instance: str, count: int) -> Wish:
        """What is left of it once so many nodes of a type, which were counted on, were refused or lost.

        Those that drain, or are to be given back, were not counted on.
        """
        nodes = tuple((kind, max(n - count, 0) if kind == instance else n) for kind, n in self.nodes)
        return replace(self, nodes=nodes)


def gpu_nodes(count: int, gpus_per_node: int) -> tuple[Node, ...]:
    """`count` equal nodes named "0", "1", ..: enough for jobs that need nothing but GPUs."""
    return tuple(Node(str(i), Resources(gpu=gpus_per_node)) for i in range(count))


def node_name(instance: str, number: int) -> str:
    """The id of the `number`-th node that was rented, whatever its type."""
    return f"{instance}-{number}"
