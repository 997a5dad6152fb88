"""On which nodes the trials of a stage lie."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.allocate.repack import make_pattern


@dataclass(frozen=True, slots=True)
class Packing:
    """The nodes of every trial that runs at the same time, and who lies on more of them than needed."""

    nodes_of: tuple[tuple[int, ...], ...]
    spans: tuple[bool, ...]


def tight_nodes(gpus_per_trial: int, at_once: int, gpus_per_node: int) -> int:
    """The fewest nodes with enough GPUs."""
    return -(-gpus_per_trial * at_once // gpus_per_node)


def roomy_nodes(gpus_per_trial: int, at_once: int, gpus_per_node: int) -> int:
    """The fewest nodes on which no trial spans more of them than it must."""
    full, rest = divmod(gpus_per_trial, gpus_per_node)
    shared = -(-at_once // (gpus_per_node // rest)) if rest else 0
    return at_once * full + shared


def pack(gpus_per_trial: int, at_once: int, nodes: int, gpus_per_node: int) -> Packing:
    """Trials on nodes of one size, as they will be packed when the plan is carried out."""
    pattern = make_pattern(at_once, gpus_per_trial, gpus_per_node, nodes)[:at_once]
    needed = -(-gpus_per_trial // gpus_per_node)
    return Packing(
        nodes_of=tuple(tuple(place for place, _ in pieces) for pieces in pattern),
        spans=tuple(len(pieces) > needed for pieces in pattern),
    )
