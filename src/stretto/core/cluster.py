"""The machines."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.resources import Resources


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster."""

    id: str
    capacity: Resources

    @property
    def gpus(self) -> int:
        return int(self.capacity.gpu)


def gpu_nodes(count: int, gpus_per_node: int) -> tuple[Node, ...]:
    """`count` equal nodes named "0", "1", ..: enough for jobs that need nothing but GPUs."""
    return tuple(Node(str(i), Resources(gpu=gpus_per_node)) for i in range(count))
