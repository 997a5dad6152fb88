"""Monte Carlo simulation of a plan: time and cost of each stage over many samples at once.

The execution of a plan is a DAG of tasks. In every stage

- SCALE requests the missing nodes (one queueing delay),
- INIT starts up each of them,
- TRAIN trains each trial as soon as its own nodes are ready,
- SYNC waits for all trials and compares them.

We let the first trials survive and keep the first nodes. On given samples a stage then depends only on its
own row of the plan and on the number of nodes kept, so it is computed once for all plans that share these.
The last stage has no SYNC: a node is given back when its own last trial ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stretto.core.units import HOUR_S
from stretto.planning.draws import Draws, first_samples, sources
from stretto.planning.forecast import StudyProgress
from stretto.planning.plan import Plan, StagePacking, StagePlan, pack, roomy_nodes
from stretto.planning.profile import Floats
from stretto.planning.tuning import Tuning
from stretto.pricing.billing import Per

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class StageRun:
    """Time and GPU time of a stage, by sample."""

    duration_s: Floats
    gpu_s: Floats
    """GPU time of its trials, including starts."""
    node_end_s: Floats | None = None
    """[sample, node]: when each node is given back; only in the last stage."""


@dataclass(frozen=True, slots=True)
class PlanRun:
    """Finish time and cost of a plan, by sample."""

    finish_s: Floats
    cost_usd: Floats


@dataclass(frozen=True, slots=True)
class _OneWave:
    """A stage with all trials at once: when its nodes are done, if they were kept and if they are new."""

    used: Ints
    """Nodes with trials, ascending."""
    kept_s: Floats
    """[sample, i]: the latest end on the first i used nodes, if they were kept."""
    new_s: Floats
    """[sample, i]: the latest end on the used nodes from i on, if they are new."""
    gpu_s: Floats

    def durations(self, queue_s: Floats, kept: Ints) -> Floats:
        """[sample, i]: the stage's duration with kept[i] nodes kept."""
        split = np.searchsorted(self.used, kept)
        return np.maximum(self.kept_s[:, split], queue_s[:, None] + self.new_s[:, split])


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of a stage after all its trials."""

    end_s: Floats
    """[sample, slot]"""
    begun_s: Floats
    """[sample]: when the last trial started."""
    gpu_s: Floats


@dataclass(slots=True)
class _Group:
    """Nodes that were requested together."""

    count: int
    since_s: Floats
    free: bool = False
    """Our own nodes: they stay, and are charged separately, to the end."""


class Execution:
    """Simulates plans of one study on one set of samples, and remembers the stages already simulated."""

    def __init__(self, tuning: Tuning, draws: Draws, start: StudyProgress | None = None) -> None:
        self._tuning = tuning
        self._draws = draws
        self._start = start or StudyProgress(stage=0, trials=tuning.study.trials)
        self._last = len(draws.epochs) - 1
        self._instances = {instance.name: instance for instance in tuning.instances}
        self._waves: dict[tuple[int, StagePlan], _OneWave] = {}
        self._stages: dict[tuple[int, StagePlan, int], StageRun] = {}

    def run(self, plan: Plan, *, to_the_end: bool = False) -> PlanRun:
        """Finish time and cost of a plan; `to_the_end`: the last stage holds all its nodes to the end."""
        billing = self._tuning.billing
        now_s: Floats = np.full(self._draws.samples, self._start.elapsed_s)
        instance = plan.stages[0].instance
        groups, cost = self._begin(instance)
        for index, stage in enumerate(plan.stages):
            if stage.instance != instance:
                cost = cost + self._release(groups, 0, now_s, instance)
                instance = stage.instance
                groups = self._free(instance)
            cost = cost + self._release(groups, stage.nodes, now_s, instance)
            kept = min(sum(group.count for group in groups), stage.nodes)
            run = self.stage(index, stage, kept)
            if kept < stage.nodes:
                groups.append(_Group(stage.nodes - kept, now_s + self._draws.queue_s[index]))
                cost = cost + (stage.nodes - kept) * billing.usd_per_new_node
            if billing.per is Per.FUNCTION:
                cost = cost + run.gpu_s * self.usd_per_gpu_s(stage)
            begun_s, now_s = now_s, now_s + run.duration_s
        cost = cost + self._own_usd(now_s)
        if to_the_end or run.node_end_s is None or billing.per is Per.FUNCTION:
            return PlanRun(now_s, cost + self._release(groups, 0, now_s, instance))
        end_s = begun_s[:, None] + run.node_end_s
        return PlanRun(now_s, cost + self._release_each(groups, end_s, instance))

    def first(self, samples: int) -> Execution:
        """The same on the first samples only."""
        return Execution(self._tuning, first_samples(self._draws, samples), self._start)

    def without_each_source(self) -> dict[str, Execution]:
        """By source of uncertainty: the same samples with this source fixed at its mean."""
        return {
            name: Execution(self._tuning, held, self._start) for name, held in sources(self._draws).items()
        }

    def stage(self, index: int, stage: StagePlan, kept: int) -> StageRun:
        """The stage with `kept` of its nodes kept from the stage before."""
        key = index, stage, kept
        if key not in self._stages:
            self._stages[key] = self._run_stage(index, stage, kept)
        return self._stages[key]

    def mean_durations(self, index: int, stage: StagePlan) -> Floats:
        """Mean duration of the stage by number of nodes kept; approximate if it has waves."""
        if stage.at_once < stage.trials:
            none, every = (
                float(self.stage(index, stage, kept).duration_s.mean()) for kept in (0, stage.nodes)
            )
            return np.linspace(none, every, stage.nodes + 1)
        wave = self._one_wave(index, stage)
        durations = wave.durations(self._draws.queue_s[index], np.arange(stage.nodes + 1))
        return np.asarray(durations.mean(axis=0))

    def mean_node_s(self, index: int, stage: StagePlan) -> Floats:
        """Mean node time of the stage by number of nodes kept; approximate in the last stage."""
        unpaid_s = np.arange(stage.nodes, -1, -1) * self._draws.queue_s[index].mean()
        if index < self._last:
            return np.asarray(stage.nodes * self.mean_durations(index, stage) - unpaid_s)
        ends = [self.stage(index, stage, kept).node_end_s for kept in (0, stage.nodes)]
        none, every = (float(end_s.sum(axis=1).mean()) for end_s in ends if end_s is not None)
        return np.asarray(np.linspace(none, every, stage.nodes + 1) - unpaid_s)

    def free_nodes(self, instance: str) -> int:
        """Our own nodes that can be used as nodes of this type."""
        return sum(node.free and node.instance == instance for node in self._start.nodes)

    def usd_per_gpu_s(self, stage: StagePlan) -> float:
        """The price of GPU time when it is billed by use; our own nodes have a price of their own."""
        instance = self._instances[stage.instance]
        rented = instance.usd_per_hour / instance.gpus / HOUR_S
        own = next((node.usd_per_hour for node in self._tuning.own if node.gpus == instance.gpus), 0.0)
        share = min(self.free_nodes(stage.instance) / stage.nodes, 1.0)
        return rented + share * (own / instance.gpus / HOUR_S - rented)

    def _own_usd(self, finish_s: Floats) -> Floats | float:
        """What our own nodes cost from the study's start to its end."""
        own = self._tuning.own
        if not own:
            return 0.0
        billing, data_usd = self._tuning.billing, len(own) * self._tuning.billing.usd_per_new_node
        if billing.per is Per.FUNCTION:
            return data_usd
        return data_usd + billing.charged_s(finish_s) * self._tuning.own_usd_per_s

    def _begin(self, instance: str) -> tuple[list[_Group], Floats]:
        """The nodes held at the start, the oldest first; and the cost so far, with nodes of other types."""
        start, samples = self._start, self._draws.samples
        cost: Floats = np.full(samples, start.spent_usd)
        groups = self._free(instance)
        paid = (node for node in start.nodes if not node.free)
        for node in sorted(paid, key=lambda node: node.since_s):
            if node.instance == instance:
                groups.append(_Group(1, np.full(samples, node.since_s)))
            else:
                cost = cost + self._charge(np.full(samples, start.elapsed_s - node.since_s), node.instance)
        return groups, cost

    def _free(self, instance: str) -> list[_Group]:
        count = self.free_nodes(instance)
        return [_Group(count, np.zeros(self._draws.samples), free=True)] if count else []

    def _release(self, groups: list[_Group], keep: int, now_s: Floats, instance: str) -> Floats | float:
        """Give back all but the first `keep` nodes, the newest first; returns their cost."""
        surplus = sum(group.count for group in groups) - keep
        cost: Floats | float = 0.0
        while surplus > 0 and not groups[-1].free:
            group = groups[-1]
            gone = min(surplus, group.count)
            surplus -= gone
            group.count -= gone
            if not group.count:
                groups.pop()
            cost = cost + gone * self._charge(now_s - group.since_s, instance)
        return cost

    def _release_each(self, groups: list[_Group], end_s: Floats, instance: str) -> Floats | float:
        """Give back every node at its own time; returns their cost."""
        cost: Floats | float = 0.0
        first = 0
        for group in groups:
            if not group.free:
                held_s = end_s[:, first : first + group.count] - group.since_s[:, None]
                cost = cost + np.sum(self._charge(held_s, instance), axis=1)
            first += group.count
        return cost

    def _charge(self, held_s: Floats, instance: str) -> Floats | float:
        """The cost of a node held for this time."""
        if self._tuning.billing.per is Per.FUNCTION:
            return 0.0
        return self._tuning.billing.charged_s(held_s) * (self._instances[instance].usd_per_hour / HOUR_S)

    def _run_stage(self, index: int, stage: StagePlan, kept: int) -> StageRun:
        if stage.at_once == stage.trials and index < self._last:
            wave = self._one_wave(index, stage)
            durations = wave.durations(self._draws.queue_s[index], np.array([kept]))
            return StageRun(durations[:, 0], wave.gpu_s)
        packing = pack(stage.gpus_per_trial, stage.at_once, stage.nodes, self._instances[stage.instance].gpus)
        ready_s = self._draws.queue_s[index][:, None] + self._draws.init_s[index][:, : stage.nodes]
        ready_s[:, :kept] = 0.0
        slots = self._fill_slots(index, stage, packing, _largest_of_nodes(ready_s, packing))
        end_s = slots.end_s.max(axis=1)
        if index < self._last:
            return StageRun(end_s, slots.gpu_s)
        node_end_s = np.repeat(slots.begun_s[:, None], stage.nodes, axis=1)  # no later trial needs the node
        used, by_node = _latest_by_node(slots.end_s, packing)
        node_end_s[:, used] = by_node
        node_end_s[:, kept:] = np.maximum(node_end_s[:, kept:], self._draws.queue_s[index][:, None])
        return StageRun(end_s, slots.gpu_s, node_end_s)

    def _fill_slots(self, index: int, stage: StagePlan, packing: StagePacking, ready_s: Floats) -> _Slots:
        """Trials start in order, each in the slot that is free first."""
        if stage.at_once == stage.trials:
            train_s = self._train_s(index, stage, packing)
            return _Slots(ready_s + train_s, ready_s.max(axis=1), train_s.sum(axis=1) * stage.gpus_per_trial)
        pace, work_s = self._pace(stage, packing), self._work_s(index, stage)
        start_s = self._start_s()
        free_s, rows = ready_s.copy(), np.arange(self._draws.samples)
        busy_s, begun_s = (np.zeros(self._draws.samples) for _ in range(2))
        for trial in range(stage.trials):
            slot = free_s.argmin(axis=1)
            begun_s = free_s[rows, slot]
            train_s = start_s + work_s[:, trial] * pace[rows, slot]
            free_s[rows, slot] += train_s
            busy_s += train_s
        return _Slots(free_s, begun_s, busy_s * stage.gpus_per_trial)

    def _one_wave(self, index: int, stage: StagePlan) -> _OneWave:
        gpus = self._instances[stage.instance].gpus
        used = min(stage.nodes, roomy_nodes(stage.gpus_per_trial, stage.at_once, gpus))
        key = index, replace(stage, nodes=used)
        if key not in self._waves:
            self._waves[key] = self._end_by_node(index, stage, used)
        return self._waves[key]

    def _end_by_node(self, index: int, stage: StagePlan, nodes: int) -> _OneWave:
        instance = self._instances[stage.instance]
        packing = pack(stage.gpus_per_trial, stage.at_once, nodes, instance.gpus)
        train_s = self._train_s(index, stage, packing)
        used, by_node = _latest_by_node(train_s, packing)
        edge = np.full((self._draws.samples, 1), -np.inf)
        new_s = by_node + self._draws.init_s[index][:, used]
        latest_new_s = np.maximum.accumulate(new_s[:, ::-1], axis=1)[:, ::-1]
        return _OneWave(
            used=used,
            kept_s=np.hstack([edge, np.maximum.accumulate(by_node, axis=1)]),
            new_s=np.hstack([latest_new_s, edge]),
            gpu_s=train_s.sum(axis=1) * stage.gpus_per_trial,
        )

    def _train_s(self, index: int, stage: StagePlan, packing: StagePacking) -> Floats:
        """[sample, trial]: time of a start and of the stage's epochs."""
        return self._start_s()[:, None] + self._work_s(index, stage) * self._pace(stage, packing)

    def _start_s(self) -> Floats:
        """[sample]"""
        return self._tuning.profile.start_s * self._draws.starts

    def _work_s(self, index: int, stage: StagePlan) -> Floats:
        """[sample, trial]: time of the stage's epochs on one GPU of normal speed."""
        draws = self._draws
        factors = draws.trials[:, : stage.trials] * draws.epochs[index][:, : stage.trials]
        return factors * (stage.epochs * draws.epoch_s)[:, None]

    def _pace(self, stage: StagePlan, packing: StagePacking) -> Floats:
        """[sample, slot]: time relative to one GPU of normal speed; the slowest node sets a trial's pace."""
        scaling = self._tuning.profile.scaling
        speeds = {
            spans: scaling.speedup(stage.gpus_per_trial, spans=spans) * self._instances[stage.instance].speed
            for spans in set(packing.spans)
        }
        slowest = _largest_of_nodes(self._draws.nodes, packing)
        return np.asarray(slowest / np.array([speeds[spans] for spans in packing.spans]))


def _largest_of_nodes(by_node: Floats, packing: StagePacking) -> Floats:
    """[sample, slot] of [sample, node]: the largest value among a slot's nodes."""
    if all(len(mine) == 1 for mine in packing.nodes_of):
        return by_node[:, [mine[0] for mine in packing.nodes_of]]
    return np.stack([by_node[:, mine].max(axis=1) for mine in packing.nodes_of], axis=1)


def _latest_by_node(by_slot: Floats, packing: StagePacking) -> tuple[Ints, Floats]:
    """The used nodes; and [sample, used node] of [sample, slot]: the largest value among a node's slots."""
    pairs = sorted((node, slot) for slot, mine in enumerate(packing.nodes_of) for node in mine)
    used, first = np.unique(np.array([node for node, _ in pairs]), return_index=True)
    return used, np.maximum.reduceat(by_slot[:, [slot for _, slot in pairs]], first, axis=1)
