"""The nodes of a cluster, and the nodes that a policy requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.core.resources import Resources


@dataclass(frozen=True, slots=True)
class Node:
    """One node (machine) of the cluster."""

    id: str
    capacity: Resources
    instance: str = ""
    """The instance type it was rented as; empty for our own (not rented) nodes."""

    @property
    def gpus(self) -> int:
        return int(self.capacity.gpu)


@dataclass(frozen=True, slots=True)
class Wish:
    """The cluster that a policy requests; requesting the same twice changes nothing."""

    nodes: tuple[tuple[str, int], ...]
    """(instance type, number of nodes), including nodes that are already here or coming."""
    release: tuple[str, ...] = ()
    """Nodes to give back; nothing runs on them any more."""

    def count(self, instance: str) -> int:
        """The number of requested nodes of an instance type."""
        return dict(self.nodes).get(instance, 0)

    def less(self, instance: str, count: int) -> Wish:
        """The request without `count` nodes of an instance type that were refused or lost."""
        nodes = tuple((kind, max(n - count, 0) if kind == instance else n) for kind, n in self.nodes)
        return replace(self, nodes=nodes)


def gpu_nodes(count: int, gpus_per_node: int) -> tuple[Node, ...]:
    """`count` equal nodes named "0", "1", .. with GPUs only."""
    return tuple(Node(str(i), Resources(gpu=gpus_per_node)) for i in range(count))


def node_name(instance: str, number: int) -> str:
    """The id of the `number`-th node that was rented, whatever its type."""
    return f"{instance}-{number}"
