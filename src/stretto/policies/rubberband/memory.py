"""Where the execution of a plan stands: what `rubberband` remembers from one decision to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.allocate.repack import repack
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.cluster import Node
from stretto.planning.forecast import HeldNode
from stretto.planning.plan import StagePlan, roomy_nodes
from stretto.pricing.instances import Instance

TO_COME = "to come "
"""Begins the stand-in for a node that was asked for and is not here yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """What the plan in force rests on."""

    text: str
    """Which plan it is, for people."""
    made_s: float
    finish_s: float
    """When it was expected to end."""
    stretch: float
    """Expected duration over that of a study in which nothing varies."""
    slowness: float
    """Time of an epoch relative to the profile, as it was believed then."""


@dataclass(slots=True, kw_only=True)
class PlanState:
    """A plan under way."""

    stages: list[StagePlan]
    footing: PlanBasis
    stage: int = 0
    replans: int = 0
    asked_s: float = 0.0
    """When nodes were last asked for, because of a new stage or of a loss."""
    check_s: float | None = None
    """When to look next whether the deadline is in danger; None: not in this stage any more."""
    short: str = ""
    """Why the stage runs on less than planned, if so."""
    refusals: int = 0
    """How many refusals were taken note of."""
    again_s: float | None = None
    """When nodes are asked for again, all of the stage's having been refused; None: as soon as needed."""
    in_vain: int = 0
    """How often in a row that was: until a node comes."""
    whole: StagePlan | None = None
    """The stage as planned, if it is done on less; that is asked for again where nothing comes at all."""

    kept: list[str] = field(default_factory=list)
    """The stage's nodes, those to come included."""
    slots: list[dict[str, int]] = field(default_factory=list)
    """GPUs by node for every trial that may run at once; empty: given up."""
    homes: dict[str, int] = field(default_factory=dict)
    """The slot in which a trial should begin the stage."""

    quota: int
    """Trials to let into the first stage."""
    entered: int = 0
    """Trials that were."""
    living: list[str] = field(default_factory=list)
    """Trials of the stage, the best first."""
    runs: dict[str, int] = field(default_factory=dict)
    """The slot of every trial that runs."""
    done: dict[str, float] = field(default_factory=dict)
    """Scores of the trials that are at the end of the stage."""
    was: dict[str, dict[str, int]] = field(default_factory=dict)
    """What those held."""

    spent_usd: float = 0.0
    """What nodes that are gone cost, and GPU time that is paid by use."""
    held: dict[str, HeldNode] = field(default_factory=dict)
    """Rented nodes that are here."""
    counted_gpu_s: dict[str, float] = field(default_factory=dict)
    """GPU time of each trial that is in `spent_usd`."""

    @property
    def plan(self) -> StagePlan:
        return self.stages[self.stage]

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.stages) - 1

    @property
    def pending(self) -> list[str]:
        """Trials that neither run nor are at the end of the stage."""
        return [trial for trial in self.living if trial not in self.done and trial not in self.runs]

    @property
    def to_come(self) -> int:
        """Nodes that were asked for and are not here."""
        return sum(node.startswith(TO_COME) for node in self.kept)

    def allocation(self, slot: int) -> Allocation:
        return on_nodes(self.slots[slot])

    def lay_out(self, nodes: Sequence[str], count: int, gpus: int, size: int, at_once: int) -> None:
        """Slots of `gpus` GPUs for `at_once` trials on `count` nodes of `size`, near where trials were.

        Nodes that are not among `nodes` are to come.
        """
        pending = [trial for trial in self.living if trial not in self.done][:at_once]
        names = pending + [f"later {number}" for number in range(at_once - len(pending))]
        missing = [f"{TO_COME}{number}" for number in range(count - len(nodes))]
        packing = repack(
            [*nodes, *missing],
            size,
            {name: on_nodes(self.was.get(name, {})) for name in names},
            gpus,
            count,
        )
        self.kept = [node for node in (*nodes, *missing) if node not in packing.released]
        self.slots = [dict(packing.allocations[name].workers) for name in names]
        self.homes = {trial: number for number, trial in enumerate(pending)}
        self.runs, self.short = {}, ""

    def match_nodes(self, here: Sequence[str]) -> bool:
        """Put nodes that came in the place of those to come; whether a node was lost."""
        present = set(here)
        lost = [node for node in self.kept if not node.startswith(TO_COME) and node not in present]
        numbers = [int(node.removeprefix(TO_COME)) for node in self.kept if node.startswith(TO_COME)]
        first = max(numbers, default=-1) + 1
        self._rename({node: f"{TO_COME}{first + number}" for number, node in enumerate(lost)})
        fresh = [node for node in here if node not in set(self.kept)]
        places = [node for node in self.kept if node.startswith(TO_COME)]
        self._rename(dict(zip(places, fresh, strict=False)))
        return bool(lost)

    def seat(self) -> None:
        """Let pending trials begin where all nodes are here: in their own slot, else in any free one."""
        ready = {
            number
            for number, slot in enumerate(self.slots)
            if slot and not any(node.startswith(TO_COME) for node in slot)
        }
        free = ready - set(self.runs.values())
        for trial in self.pending:
            if self.homes.get(trial) in free:
                self.runs[trial] = self.homes[trial]
                free.remove(self.homes[trial])
        self.runs.update(zip(self.pending, sorted(free), strict=False))

    def expect_less(self, count: int) -> list[str]:
        """Cross out so many of the nodes to come, the last first; what they were called."""
        to_come = [node for node in self.kept if node.startswith(TO_COME)]
        dropped = to_come[len(to_come) - count :]
        self.kept = [node for node in self.kept if node not in dropped]
        return dropped

    def give_up_slots(self, nodes: Iterable[str]) -> bool:
        """Give up the slots that need one of these nodes; whether there are any."""
        gone = set(nodes)
        hit = [bool(gone & slot.keys()) for slot in self.slots]
        self.slots = [{} if lost else slot for lost, slot in zip(hit, self.slots, strict=True)]
        return any(hit)

    def stand_by(self, until_s: float, why: str) -> None:
        """There is no node, and none will come: nobody runs until nodes are asked for again."""
        self.stages[self.stage], self.whole = self.whole or self.plan, None
        self.slots, self.runs, self.homes = [], {}, {}
        self.again_s, self.check_s, self.short = until_s, None, why

    def cut_down(self, stage: StagePlan) -> None:
        """Do the stage in another way, for want of nodes."""
        self.whole = self.whole or self.plan
        self.stages[self.stage] = stage

    def adopt(self, stage: int, stages: Sequence[StagePlan], footing: PlanBasis) -> None:
        """A new plan from a stage on."""
        self.stages[stage:] = stages
        self.footing, self.whole = footing, None
        self.replans += 1

    def give_up_idle(self) -> None:
        """Keep only the slots in use, and their nodes."""
        used = set(self.runs.values())
        self.slots = [slot if number in used else {} for number, slot in enumerate(self.slots)]
        needed = {node for slot in self.slots for node in slot}
        self.kept = [node for node in self.kept if node in needed]

    def leave(self, trial: str) -> None:
        """The trial is no longer part of the stage."""
        self.living.remove(trial)
        for of_trial in (self.runs, self.done, self.was, self.homes, self.counted_gpu_s):
            of_trial.pop(trial, None)

    def _rename(self, names: Mapping[str, str]) -> None:
        if names:
            self.kept = [names.get(node, node) for node in self.kept]
            self.slots = [
                {names.get(node, node): count for node, count in slot.items()} for slot in self.slots
            ]


def load(memory: Any) -> PlanState:
    """A course from plain data."""
    return msgspec.convert(memory, PlanState)


def dump(course: PlanState) -> Any:
    """A course as plain data."""
    return msgspec.to_builtins(course)


def usable(nodes: Iterable[Node], instance: str, gpus: int) -> list[str]:
    """Nodes of the type, and nodes of its size that are simply there."""
    return [node.id for node in nodes if node.instance in {"", instance} and node.gpus == gpus]


def own_nodes(nodes: Iterable[Node], instances: Iterable[Instance]) -> tuple[HeldNode, ...]:
    """Nodes that are simply there, as what a planner may count on: one of each type that has their size."""
    own = [node for node in nodes if not node.instance]
    return tuple(
        HeldNode(instance.name, 0.0, free=True)
        for instance in instances
        for node in own
        if node.gpus == instance.gpus
    )


def cut_to(stage: StagePlan, trials: int, gpus_per_node: int) -> tuple[int, int]:
    """Trials at once and nodes, where fewer trials are left than planned."""
    if trials >= stage.at_once:
        return stage.at_once, stage.nodes
    return trials, min(stage.nodes, roomy_nodes(stage.gpus_per_trial, trials, gpus_per_node))
