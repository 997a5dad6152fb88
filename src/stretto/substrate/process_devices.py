"""Which devices of its nodes a job has for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.core.allocation import Allocation
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Job


class DevicePool:
    """Hands out the devices of each node, one per slot, never one to two jobs."""

    def __init__(self, nodes: Sequence[Node], devices: Mapping[str, Sequence[str]]) -> None:
        """`devices` gives the ids of a node's slots, as CUDA_VISIBLE_DEVICES has them; none: not managed."""
        self._devices = {node.id: tuple(devices.get(node.id, ())) for node in nodes}
        self._held: dict[str, tuple[str, ...]] = {}
        every = [one for ids in self._devices.values() for one in ids]
        if len(set(every)) < len(every):
            raise InputError(f"a device is given twice: {', '.join(every)}.", remedy="Give each once.")
        for node in nodes:
            if self._devices[node.id] and len(self._devices[node.id]) < node.gpus:
                raise InputError(
                    f"node {node.id} has {node.gpus} slots and {len(self._devices[node.id])} devices.",
                    remedy="Give a device for each slot, or none at all.",
                )

    def take(self, job: Job, allocation: Allocation) -> tuple[str, ...] | None:
        """The devices the job has from now on instead of what it had; None if its nodes have no list."""
        self.give_back(job.id)
        held = {one for ids in self._held.values() for one in ids}
        managed = {node: uses for node, uses in allocation.uses(job).items() if self._devices.get(node)}
        if not managed:
            return None
        taken: list[str] = []
        for node, uses in managed.items():
            free = [one for one in self._devices[node] if one not in held]
            if uses.gpu > len(free):
                raise InputError(f"node {node} has {len(free)} free devices, and {uses.gpu:g} are needed.")
            taken += free[: round(uses.gpu)]
        self._held[job.id] = tuple(taken)
        return self._held[job.id]

    def give_back(self, job_id: str) -> None:
        self._held.pop(job_id, None)
