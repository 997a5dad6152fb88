"""A plan: GPUs per trial and nodes for each stage; and how the trials of a stage are packed on nodes."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.allocate.repack import make_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a study: how many trials train to which epoch, on which nodes."""

    first_epoch: int
    last_epoch: int
    trials: int
    gpus_per_trial: int
    at_once: int
    """Trials that run at the same time: all, or fewer in waves."""
    nodes: int
    instance: str

    @property
    def epochs(self) -> int:
        return self.last_epoch - self.first_epoch + 1

    @property
    def waves(self) -> int:
        return -(-self.trials // self.at_once)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every stage of a study runs on."""

    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class StagePacking:
    """The nodes of each slot, and whether it spans more nodes than it must."""

    nodes_of: tuple[tuple[int, ...], ...]
    spans: tuple[bool, ...]


def tight_nodes(gpus_per_trial: int, at_once: int, gpus_per_node: int) -> int:
    """The fewest nodes with enough GPUs."""
    return -(-gpus_per_trial * at_once // gpus_per_node)


def roomy_nodes(gpus_per_trial: int, at_once: int, gpus_per_node: int) -> int:
    """The fewest nodes on which no trial spans more nodes than it must."""
    full, rest = divmod(gpus_per_trial, gpus_per_node)
    shared = -(-at_once // (gpus_per_node // rest)) if rest else 0
    return at_once * full + shared


def pack(gpus_per_trial: int, at_once: int, nodes: int, gpus_per_node: int) -> StagePacking:
    """The packing of trials on nodes of one size, the same as when the plan is executed."""
    pattern = make_pattern(at_once, gpus_per_trial, gpus_per_node, nodes)[:at_once]
    needed = -(-gpus_per_trial // gpus_per_node)
    return StagePacking(
        nodes_of=tuple(tuple(place for place, _ in pieces) for pieces in pattern),
        spans=tuple(len(pieces) > needed for pieces in pattern),
    )
