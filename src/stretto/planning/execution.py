"""How a plan would go: the execution of a study, stage by stage, over many samples at once.

A stage asks for the nodes it lacks (SCALE: one queue delay), waits for each of them to start up (INIT),
trains every trial as soon as its own nodes are there (TRAIN) and compares the trials at the end (SYNC).
Those that live on are taken to be the first ones, and so are the nodes that are kept: given the samples, what
a stage takes then depends on nothing but its own row of the plan and on how many nodes it is handed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stretto.planning.draws import Draws, first_samples, sources
from stretto.planning.forecast import Progress
from stretto.planning.packing import Packing, pack, roomy_nodes
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.profile import Floats
from stretto.planning.tuning import Tuning
from stretto.pricing.billing import Per

Ints = npt.NDArray[np.intp]
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StageRun:
    """What a stage takes, by sample."""

    duration_s: Floats
    gpu_s: Floats
    """GPU time of its trials, starts included."""


@dataclass(frozen=True, slots=True)
class PlanRun:
    """What a plan takes, by sample."""

    finish_s: Floats
    cost_usd: Floats


@dataclass(frozen=True, slots=True)
class _OneWave:
    """All trials of a stage at once: when the trials on its nodes end, for nodes kept and for new ones."""

    used: Ints
    """Nodes that trials lie on, ascending."""
    kept_s: Floats
    """[sample, i]: the latest end among the first i used nodes, all there from the start."""
    new_s: Floats
    """[sample, i]: the latest end among the used nodes from i on, all of them new."""
    gpu_s: Floats

    def durations(self, queue_s: Floats, kept: Ints) -> Floats:
        """[sample, i] for every number of kept nodes asked for."""
        split = np.searchsorted(self.used, kept)
        return np.maximum(self.kept_s[:, split], queue_s[:, None] + self.new_s[:, split])


@dataclass(slots=True)
class _Group:
    """Nodes that came together."""

    count: int
    since_s: Floats
    counted_before: bool
    """Whether they were here before the plan began, so that a minimum charge is behind them."""


class Execution:
    """Runs plans of one study over one set of samples, and remembers the stages it has run."""

    def __init__(self, tuning: Tuning, draws: Draws, start: Progress | None = None) -> None:
        self._tuning = tuning
        self._draws = draws
        self._start = start or Progress(stage=0, trials=tuning.study.trials)
        self._instances = {instance.name: instance for instance in tuning.instances}
        self._waves: dict[tuple[int, StagePlan], _OneWave] = {}
        self._stages: dict[tuple[int, StagePlan, int], StageRun] = {}

    def run(self, plan: Plan) -> PlanRun:
        """Finish time and cost of a plan."""
        start, billing = self._start, self._tuning.billing
        now_s: Floats = np.full(self._draws.samples, start.elapsed_s)
        cost: Floats = np.full(self._draws.samples, start.spent_usd)
        held = dict(start.nodes)
        instance = plan.stages[0].instance
        groups = [_Group(held[instance], now_s, True)] if held.get(instance) else []
        for index, stage in enumerate(plan.stages):
            price = self._instances[stage.instance].usd_per_hour / HOUR_S
            if stage.instance != instance:
                cost = cost + self._release(groups, 0, now_s, instance)
                instance = stage.instance
            cost = cost + self._release(groups, stage.nodes, now_s, instance)
            kept = sum(group.count for group in groups)
            run = self.stage(index, stage, kept)
            if kept < stage.nodes:
                groups.append(_Group(stage.nodes - kept, now_s + self._draws.queue_s[index], False))
                cost = cost + (stage.nodes - kept) * billing.usd_per_new_node
            if billing.per is Per.FUNCTION:
                cost = cost + run.gpu_s * (price / self._instances[instance].gpus)
            now_s = now_s + run.duration_s
        return PlanRun(now_s, cost + self._release(groups, 0, now_s, instance))

    def first(self, samples: int) -> Execution:
        """The same over fewer samples."""
        return Execution(self._tuning, first_samples(self._draws, samples), self._start)

    def without_each_source(self) -> dict[str, Execution]:
        """By source of doubt: the same samples with that one held at its mean."""
        return {
            name: Execution(self._tuning, held, self._start) for name, held in sources(self._draws).items()
        }

    def stage(self, index: int, stage: StagePlan, kept: int) -> StageRun:
        """What the stage takes when it is handed `kept` of its nodes."""
        key = index, stage, kept
        if key not in self._stages:
            self._stages[key] = self._run_stage(index, stage, kept)
        return self._stages[key]

    def mean_durations(self, index: int, stage: StagePlan) -> Floats:
        """Mean duration of the stage by number of nodes it is handed; approximate where there are waves."""
        if stage.at_once < stage.trials:
            none, every = (
                float(self.stage(index, stage, kept).duration_s.mean()) for kept in (0, stage.nodes)
            )
            return np.linspace(none, every, stage.nodes + 1)
        wave = self._one_wave(index, stage)
        durations = wave.durations(self._draws.queue_s[index], np.arange(stage.nodes + 1))
        return np.asarray(durations.mean(axis=0) + self._tuning.profile.sync_s)

    def _release(self, groups: list[_Group], keep: int, now_s: Floats, instance: str) -> Floats | float:
        """Give back all but the first `keep` nodes, the newest first; what those cost."""
        surplus = sum(group.count for group in groups) - keep
        price = self._instances[instance].usd_per_hour / HOUR_S
        cost: Floats | float = 0.0
        while surplus > 0:
            group = groups[-1]
            gone = min(surplus, group.count)
            surplus -= gone
            group.count -= gone
            if not group.count:
                groups.pop()
            if self._tuning.billing.per is Per.INSTANCE:
                held_s = now_s - group.since_s
                charged_s = held_s if group.counted_before else self._tuning.billing.charged_s(held_s)
                cost = cost + charged_s * (gone * price)
        return cost

    def _run_stage(self, index: int, stage: StagePlan, kept: int) -> StageRun:
        sync_s = self._tuning.profile.sync_s
        if stage.at_once < stage.trials:
            run = self._run_waves(index, stage, kept)
            return StageRun(run.duration_s + sync_s, run.gpu_s)
        wave = self._one_wave(index, stage)
        queue_s = self._draws.queue_s[index]
        return StageRun(wave.durations(queue_s, np.array([kept]))[:, 0] + sync_s, wave.gpu_s)

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
        pairs = sorted((node, trial) for trial, mine in enumerate(packing.nodes_of) for node in mine)
        node_of = np.array([node for node, _ in pairs])
        used, first = np.unique(node_of, return_index=True)
        by_node = np.maximum.reduceat(train_s[:, [trial for _, trial in pairs]], first, axis=1)
        edge = np.full((self._draws.samples, 1), -np.inf)
        new_s = by_node + self._draws.init_s[index][:, used]
        latest_new_s = np.maximum.accumulate(new_s[:, ::-1], axis=1)[:, ::-1]
        return _OneWave(
            used=used,
            kept_s=np.hstack([edge, np.maximum.accumulate(by_node, axis=1)]),
            new_s=np.hstack([latest_new_s, edge]),
            gpu_s=train_s.sum(axis=1) * stage.gpus_per_trial,
        )

    def _train_s(self, index: int, stage: StagePlan, packing: Packing) -> Floats:
        """[sample, trial]: a start and the epochs of the stage."""
        return self._tuning.profile.start_s + self._work_s(index, stage) * self._pace(stage, packing)

    def _work_s(self, index: int, stage: StagePlan) -> Floats:
        """[sample, trial]: the epochs of the stage on one GPU of the usual speed."""
        draws = self._draws
        factors = draws.trials[:, : stage.trials] * draws.epochs[index][:, : stage.trials]
        return factors * (stage.epochs * draws.epoch_s)[:, None]

    def _pace(self, stage: StagePlan, packing: Packing) -> Floats:
        """[sample, slot]: time relative to one usual GPU; the slowest of its nodes sets a trial's pace."""
        scaling = self._tuning.profile.scaling
        speeds = {
            spans: scaling.speedup(stage.gpus_per_trial, spans=spans) * self._instances[stage.instance].speed
            for spans in set(packing.spans)
        }
        slowest = _largest_of_nodes(self._draws.nodes, packing)
        return np.asarray(slowest / np.array([speeds[spans] for spans in packing.spans]))

    def _run_waves(self, index: int, stage: StagePlan, kept: int) -> StageRun:
        """Trials that wait start, in order, wherever one ends first."""
        draws, gpus = self._draws, self._instances[stage.instance].gpus
        packing = pack(stage.gpus_per_trial, stage.at_once, stage.nodes, gpus)
        ready_s = draws.queue_s[index][:, None] + draws.init_s[index][:, : stage.nodes]
        ready_s[:, :kept] = 0.0
        free_s = _largest_of_nodes(ready_s, packing)
        pace, work_s = self._pace(stage, packing), self._work_s(index, stage)
        start_s = self._tuning.profile.start_s
        rows = np.arange(draws.samples)
        busy_s = np.zeros(draws.samples)
        for trial in range(stage.trials):
            slot = free_s.argmin(axis=1)
            train_s = start_s + work_s[:, trial] * pace[rows, slot]
            free_s[rows, slot] += train_s
            busy_s += train_s
        return StageRun(free_s.max(axis=1), busy_s * stage.gpus_per_trial)


def _largest_of_nodes(by_node: Floats, packing: Packing) -> Floats:
    """[sample, slot] of [sample, node]: the largest value among a slot's nodes."""
    if all(len(mine) == 1 for mine in packing.nodes_of):
        return by_node[:, [mine[0] for mine in packing.nodes_of]]
    return np.stack([by_node[:, mine].max(axis=1) for mine in packing.nodes_of], axis=1)
