"""From how many GPUs each job gets to where: whoever keeps its number stays, others move as little as can be.

A job that shrinks leaves its smallest pieces. A job that grows or starts goes where it is whole: on a node
it already has, else on the tightest node that holds it; if none does, it spans the nodes with most room.
Numbers that fit in the cluster always find a place, since a job of GPUs alone may span nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import Node


def place_counts(
    nodes: Sequence[Node], held: Mapping[str, Allocation], counts: Mapping[str, int]
) -> dict[str, Allocation]:
    """Where each job of `counts` goes, given what jobs hold now; all of them must fit in total."""
    free = {node.id: node.gpus for node in nodes}
    placed: dict[str, Allocation] = {}
    growing: list[str] = []
    for job_id, count in counts.items():
        old = held.get(job_id, NOTHING)
        lost = any(node not in free for node in old.nodes)
        if not old or lost or count > old.worker_count:
            growing.append(job_id)
            continue
        placed[job_id] = old if count == old.worker_count else _shrunk(old, count)
        for node, workers in placed[job_id].workers:
            free[node] -= workers
    for job_id in sorted(growing, key=lambda job_id: (-counts[job_id], job_id)):
        placed[job_id] = _grown(free, held.get(job_id, NOTHING), counts[job_id])
        for node, workers in placed[job_id].workers:
            free[node] -= workers
    return placed


def _shrunk(old: Allocation, count: int) -> Allocation:
    kept: dict[str, int] = {}
    for node, workers in sorted(old.workers, key=lambda piece: -piece[1]):
        kept[node] = min(workers, count)
        count -= kept[node]
    return on_nodes((node, kept[node]) for node, _ in old.workers)


def _grown(free: Mapping[str, int], old: Allocation, count: int) -> Allocation:
    whole = [node for node, room in free.items() if room >= count]
    if whole:
        own = {node for node, _ in old.workers}
        return on_nodes({min(whole, key=lambda node: (node not in own, free[node])): count})
    taken: dict[str, int] = {}
    for node, room in sorted(free.items(), key=lambda item: -item[1]):
        taken[node] = min(room, count)
        count -= taken[node]
    return on_nodes((node, taken[node]) for node in free)
