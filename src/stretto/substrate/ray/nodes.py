"""The nodes of a Ray cluster, as Ray lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from stretto.substrate.fleet.commands import Resource

NAME_LABEL = "stretto-node"
"""The node's name in Stretto; set by the command that launches it."""
INSTANCE_LABEL = "stretto-instance"
"""The instance type, by the name that the study gives its price under."""
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
    """Empty for a node without a price."""
    draining: bool


def slot_resource() -> Resource:
    """What counts as a slot in the connected cluster: GPUs if any node has one, else CPUs."""
    return "GPU" if any(node["Resources"].get("GPU", 0.0) >= 1.0 for node in _alive()) else "CPU"


def read_nodes(resource: Resource | None = None) -> tuple[RayNode, ...]:
    """The nodes of the connected cluster that are alive and have slots, sorted by Ray's id."""
    kind = resource or slot_resource()
    draining = _draining()
    found = (_node(told, kind, draining=told["NodeID"] in draining) for told in _alive())
    return tuple(sorted((node for node in found if node.slots), key=lambda node: node.ray_id))


def is_connected() -> bool:
    """Whether this process's own Ray node is alive; without it Ray does nothing for us."""
    own = ray.get_runtime_context().get_node_id()
    return any(told["NodeID"] == own for told in _alive())


def _alive() -> list[Mapping[str, Any]]:
    return [told for told in _RAY.nodes() if told["Alive"]]


def _draining() -> frozenset[str]:
    """The ids of draining nodes; Ray has no public function for this."""
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
