"""What `rubberband` remembers between decisions: the plan, the current stage, its nodes and its trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.allocate.repack import repack
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.cluster import Node
from stretto.planning.forecast import HeldNode
from stretto.planning.plan import StagePlan, roomy_nodes
from stretto.pricing.instances import Instance

TO_COME = "to come "
"""Prefix of the placeholder for a node that was requested and is not here yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """What the current plan is based on."""

    text: str
    """A sentence about the plan for the user."""
    made_s: float
    finish_s: float
    """When the study was expected to end."""
    stretch: float
    """Expected duration relative to that of a study without any variation."""
    slowness: float
    """Time of an epoch relative to the profile, as assumed by this plan."""


@dataclass(slots=True, kw_only=True)
class PlanState:
    """The state of a plan that is being executed."""

    stages: list[StagePlan]
    footing: PlanBasis
    stage: int = 0
    replans: int = 0
    asked_s: float = 0.0
    """When nodes were last requested, for a new stage or after a loss."""
    check_s: float | None = None
    """When to check the deadline next; None: not again in this stage."""
    short: str = ""
    """The shortfall: why the stage runs on fewer nodes than planned, if it does."""
    refusals: int = 0
    """How many refusals were processed."""
    again_s: float | None = None
    """When to request nodes again after all of the stage's nodes were refused; None: no need to wait."""
    in_vain: int = 0
    """How often in a row all nodes were refused; 0 once a node comes."""
    whole: StagePlan | None = None
    """The stage as planned, if it runs on fewer nodes; requested again if no node comes at all."""

    kept: list[str] = field(default_factory=list)
    """The stage's nodes, with placeholders for those to come."""
    slots: list[dict[str, int]] = field(default_factory=list)
    """GPUs by node of each slot. A slot serves one trial at a time. Empty: the slot was given up."""
    homes: dict[str, int] = field(default_factory=dict)
    """The slot in which a trial should start the stage."""

    quota: int
    """Trials to admit to the first stage."""
    entered: int = 0
    """Trials admitted so far."""
    living: list[str] = field(default_factory=list)
    """Trials of the stage, the best first."""
    runs: dict[str, int] = field(default_factory=dict)
    """The slot of every running trial."""
    done: dict[str, float] = field(default_factory=dict)
    """Scores of the trials that reached the end of the stage."""
    was: dict[str, dict[str, int]] = field(default_factory=dict)
    """GPUs by node that those trials held."""

    spent_usd: float = 0.0
    """Cost of nodes that are gone, and of GPU time that is billed by use."""
    held: dict[str, HeldNode] = field(default_factory=dict)
    """Rented nodes that are here."""
    counted_gpu_s: dict[str, float] = field(default_factory=dict)
    """GPU time of each trial that `spent_usd` includes."""

    @property
    def plan(self) -> StagePlan:
        return self.stages[self.stage]

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.stages) - 1

    @property
    def pending(self) -> list[str]:
        """Trials that have not reached the end of the stage and do not run."""
        return [trial for trial in self.living if trial not in self.done and trial not in self.runs]

    @property
    def to_come(self) -> int:
        """Nodes that were requested and are not here yet."""
        return sum(node.startswith(TO_COME) for node in self.kept)

    def allocation(self, slot: int) -> Allocation:
        return on_nodes(self.slots[slot])

    def assign_slots(self, nodes: Sequence[str], count: int, gpus: int, size: int, at_once: int) -> None:
        """Make slots of `gpus` GPUs for `at_once` trials on `count` nodes of `size` GPUs.

        Trials keep their nodes where possible. Nodes beyond those in `nodes` get placeholders.
        """
        pending = [trial for trial in self.living if trial not in self.done][:at_once]
        names = pending + [f"later {number}" for number in range(at_once - len(pending))]
        missing = [f"{TO_COME}{number}" for number in range(count - len(nodes))]
        packing = repack(
            [*nodes, *missing], size, {name: on_nodes(self.was.get(name, {})) for name in names}, gpus, count
        )
        self.kept = [node for node in (*nodes, *missing) if node not in packing.released]
        self.slots = [dict(packing.allocations[name].workers) for name in names]
        self.homes = {trial: number for number, trial in enumerate(pending)}
        self.runs, self.short = {}, ""

    def match_nodes(self, here: Sequence[str]) -> bool:
        """Put nodes that came in the place of placeholders; True if a node was lost."""
        present = set(here)
        lost = [node for node in self.kept if not node.startswith(TO_COME) and node not in present]
        numbers = [int(node.removeprefix(TO_COME)) for node in self.kept if node.startswith(TO_COME)]
        first = max(numbers, default=-1) + 1
        self._rename({node: f"{TO_COME}{first + number}" for number, node in enumerate(lost)})
        fresh = [node for node in here if node not in set(self.kept)]
        places = [node for node in self.kept if node.startswith(TO_COME)]
        self._rename(dict(zip(places, fresh, strict=False)))
        return bool(lost)

    def start_pending(self) -> None:
        """Start pending trials in slots whose nodes are all here: in their own slot, else in a free one."""
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
        """Remove the last `count` placeholders, and return their names."""
        to_come = [node for node in self.kept if node.startswith(TO_COME)]
        dropped = to_come[len(to_come) - count :]
        self.kept = [node for node in self.kept if node not in dropped]
        return dropped

    def give_up_slots(self, nodes: Iterable[str]) -> bool:
        """Give up the slots that need one of these nodes; True if there were any."""
        gone = set(nodes)
        hit = [bool(gone & slot.keys()) for slot in self.slots]
        self.slots = [{} if lost else slot for lost, slot in zip(hit, self.slots, strict=True)]
        return any(hit)

    def stand_by(self, until_s: float, why: str) -> None:
        """No node is here or will come: nothing runs until nodes are requested again at `until_s`."""
        self.stages[self.stage], self.whole = self.whole or self.plan, None
        self.slots, self.runs, self.homes = [], {}, {}
        self.again_s, self.check_s, self.short = until_s, None, why

    def cut_down(self, stage: StagePlan) -> None:
        """Replace the current stage by one for fewer nodes."""
        self.whole = self.whole or self.plan
        self.stages[self.stage] = stage

    def adopt(self, stage: int, stages: Sequence[StagePlan], footing: PlanBasis) -> None:
        """Replace the plan from a stage on."""
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
        """Remove a trial from the stage."""
        self.living.remove(trial)
        for of_trial in (self.runs, self.done, self.was, self.homes, self.counted_gpu_s):
            of_trial.pop(trial, None)

    def _rename(self, names: Mapping[str, str]) -> None:
        if names:
            self.kept = [names.get(node, node) for node in self.kept]
            self.slots = [
                {names.get(node, node): count for node, count in slot.items()} for slot in self.slots
            ]


def usable(nodes: Iterable[Node], instance: str, gpus: int) -> list[str]:
    """Nodes of the instance type, and our own (not rented) nodes of the same size."""
    return [node.id for node in nodes if node.instance in {"", instance} and node.gpus == gpus]


def own_nodes(nodes: Iterable[Node], instances: Iterable[Instance]) -> tuple[HeldNode, ...]:
    """Our own (not rented) nodes as the planner counts them: once for each instance type of their size."""
    own = [node for node in nodes if not node.instance]
    return tuple(
        HeldNode(instance.name, 0.0, free=True)
        for instance in instances
        for node in own
        if node.gpus == instance.gpus
    )


def cut_to(stage: StagePlan, trials: int, gpus_per_node: int) -> tuple[int, int]:
    """Trials at once and nodes of a stage when only `trials` trials are left."""
    if trials >= stage.at_once:
        return stage.at_once, stage.nodes
    return trials, min(stage.nodes, roomy_nodes(stage.gpus_per_trial, trials, gpus_per_node))
