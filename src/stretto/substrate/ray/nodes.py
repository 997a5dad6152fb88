"""The nodes of a Ray cluster as it tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from stretto.substrate.fleet.nodes import Resource

NAME_LABEL = "stretto-node"
"""What Stretto calls the node; given by the command that launches it."""
INSTANCE_LABEL = "stretto-instance"
"""The type it was launched as, by the name that the study prices it under."""
GROUP_LABEL = "ray.io/node-group"
"""The node type of Ray's autoscaler."""

_RAY: Any = ray  # parts of it have no types


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node that is alive and has slots."""

    ray_id: str
    name: str
    host: str
    """Its address."""
    slots: int
    instance: str
    """Empty for one that is simply there."""
    draining: bool


def slot_resource() -> Resource:
    """What a slot is in the connected cluster: a GPU if any node has one, else a CPU."""
    return "GPU" if any(node["Resources"].get("GPU", 0.0) >= 1.0 for node in _alive()) else "CPU"


def read_nodes(resource: Resource | None = None) -> tuple[RayNode, ...]:
    """The nodes of the connected cluster that are alive and have slots, by Ray's id."""
    kind = resource or slot_resource()
    draining = _draining()
    found = (_node(told, kind, draining=told["NodeID"] in draining) for told in _alive())
    return tuple(sorted((node for node in found if node.slots), key=lambda node: node.ray_id))


def is_connected() -> bool:
    """Whether the node that this process belongs to is alive: without it Ray does nothing for us any more."""
    own = ray.get_runtime_context().get_node_id()
    return any(told["NodeID"] == own for told in _alive())


def _alive() -> list[Mapping[str, Any]]:
    return [told for told in _RAY.nodes() if told["Alive"]]


def _draining() -> frozenset[str]:
    """Ray has no public word for it."""
    return frozenset(_RAY._private.state.state.get_draining_nodes())  # noqa: SLF001


def _node(told: Mapping[str, Any], resource: Resource, *, draining: bool) -> RayNode:
    labels = told["Labels"]
    return RayNode(
        ray_id=told["NodeID"],
        name=labels.get(NAME_LABEL) or f"n{told['NodeID'][:10]}",
        host=told["NodeManagerAddress"],
        slots=int(told["Resources"].get(resource, 0.0)),
        instance=labels.get(INSTANCE_LABEL) or labels.get(GROUP_LABEL, ""),
        draining=draining,
    )
