"""Which policy gets the best model by the deadline, on learning curves that were measured.

Tasks: TaskSet's six text classifiers (no clock: every trial equally fast) and AlgoPerf's base workloads (each
trial with its own measured speed). 8 GPUs of one node, ResNet-50's scaling, 50 epochs of 35 s and 60 s for a
start, as in the published setting. Deadlines are shares of the time that 50 epochs take on one GPU.

Normalised regret: (best of the table - best found) / (best of the table - median value after one epoch), so
that 0 is the best that could be found, and 1 one epoch of a run picked blindly; more counts as 1, or a few
runs that diverged slowly would outweigh all others. Runs are paired: a seed is the same world and the same
order of trials for every policy. Intervals come from 2,000 bootstrap samples, of tasks first, then of
seeds within a task; a workload's JAX and PyTorch versions are one task. The six text classifiers are one
family, so their spread says little about other kinds of training.

What was said before running: at the two tight deadlines HyperSched has less regret than every other; at the
two loose ones, at most 0.02 more.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import data_folder, verdict

from stretto.core.seeds import child_rng
from stretto.inputs.study import StudyFile, study_of
from stretto.search.study import Direction
from stretto.simulation.studies import simulate_study, with_limits
from stretto.worlds.curve_files import load_curves
from stretto.worlds.curves import CurveTable

Floats = npt.NDArray[np.float64]

EPOCHS = 50
EPOCH_S, START_S = 35.0, 60.0
DEADLINES = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
"""Shares of the time of a whole training on one GPU; the first two are the tight ones."""
TIGHT = 2
SEEDS = 20
TOLERANCE = 0.02
ALGOPERF = ("criteo1tb", "imagenet_resnet", "librispeech_deepspeech", "ogbg")
CONTENDERS: dict[str, tuple[str, dict[str, str]]] = {
    "hypersched": ("hypersched", {}),
    "asha": ("asha", {}),
    "asha+sharing": ("asha", {"share": "uniform"}),
    "sha": ("sha", {}),
    "sha sized": ("sha", {"sized": "true", "share": "uniform"}),
    "hyperband": ("hyperband", {}),
    "random": ("random", {}),
}


@dataclass(frozen=True)
class Outcome:
    """Regret of one task by policy, deadline and seed, and how long simulating took."""

    task: str
    regret: Floats
    seconds: Floats


def main() -> None:
    tasks = all_tasks()
    print("2. HyperSched on real learning curves: normalised regret, 8 GPUs, 20 seeds")
    if not tasks:
        print("  skipped: no data/taskset or data/algoperf here (set STRETTO_DATA)")
        return
    with multiprocessing.Pool(2) as pool:
        outcomes = pool.map(run_task, tasks, chunksize=1)
    report(outcomes)


def all_tasks() -> list[str]:
    """What `load_curves` is to read, one text for each task."""
    tasks = []
    if folder := data_folder("taskset"):
        tasks += [f"taskset:{path}" for path in sorted(folder.glob("*.json.gz"))]
    if folder := data_folder("algoperf"):
        there = [f"{base}_{framework}" for base in ALGOPERF for framework in ("jax", "pytorch")]
        tasks += [
            f"algoperf:{folder}:{name}:{EPOCHS}"
            for name in there
            if (folder / "curves" / f"{name}.csv.gz").exists()
        ]
    return tasks


def run_task(text: str, seeds: Sequence[int] = range(SEEDS)) -> Outcome:
    table = load_curves(text)
    assert isinstance(table, CurveTable)
    regret = np.zeros((len(CONTENDERS), len(DEADLINES), len(seeds)))
    seconds = np.zeros_like(regret)
    for j, share in enumerate(DEADLINES.values()):
        file = with_limits(study_file(table), deadline_s=share * EPOCHS * EPOCH_S)
        for i, (policy, options) in enumerate(CONTENDERS.values()):
            for k, seed in enumerate(seeds):
                started = time.process_time()
                result = simulate_study(file, table, policy, seed=seed, options=options).result
                seconds[i, j, k] = time.process_time() - started
                regret[i, j, k] = normalised_regret(table, result.best_metric)
    return Outcome(task_name(text), regret, seconds)


def study_file(table: CurveTable) -> StudyFile:
    return study_of(
        {
            "study": {
                "name": "bench",
                "metric": table.metric,
                "direction": str(table.direction),
                "trials": len(table.configs),
            },
            "halving": {"rungs": "geometric", "min_epochs": 1, "eta": 4, "max_epochs": EPOCHS},
            "cluster": {"instances": ["p3.16xlarge"], "max_nodes": 1},
            "profile": {
                "epoch_s": {"mean": EPOCH_S, "trial_sd": 0.0, "node_sd": 0.0, "epoch_sd": 1.0},
                "speedup": {"1": 1.0, "2": 1.87, "4": 3.42, "8": 5.6},
                "start_s": START_S,
            },
            "world": {"curves": "csv:unused.csv"},
        },
        Path("bench"),
    )


def normalised_regret(table: CurveTable, found: float | None) -> float:
    sign = 1.0 if table.direction is Direction.MAX else -1.0
    best, blind = float(np.nanmax(sign * table.values)), float(np.nanmedian(sign * table.values[:, 0]))
    return min((best - (blind if found is None else sign * found)) / (best - blind), 1.0)


def task_name(text: str) -> str:
    kind, _, rest = text.partition(":")
    if kind == "taskset":
        return Path(rest).name.removeprefix("FixedTextRNNClassification_imdb_").removesuffix(".json.gz")
    return rest.split(":")[-2]


def report(outcomes: Sequence[Outcome]) -> None:
    regret = np.stack([outcome.regret for outcome in outcomes])
    names = list(CONTENDERS)
    bases = [outcome.task.removesuffix("_jax").removesuffix("_pytorch") for outcome in outcomes]
    groups = [np.flatnonzero([base == one for one in bases]) for base in dict.fromkeys(bases)]
    print(f"  {'deadline':14}" + "".join(f"{name:>14}" for name in names))
    for j, deadline in enumerate(DEADLINES):
        means = regret[:, :, j, :].mean(axis=(0, 2))
        print(f"  {deadline:14}" + "".join(f"{mean:14.4f}" for mean in means))
    print("  less regret than (mean of paired differences, 95 % interval; positive: HyperSched is better)")
    for j, deadline in enumerate(DEADLINES):
        for i, name in enumerate(names[1:], start=1):
            gain = regret[:, i, j, :] - regret[:, 0, j, :]
            low, high = bootstrap(gain, groups, f"{deadline} {name}")
            wins = (gain.mean(axis=1) > 0).sum()
            bar = 0.0 if j < TIGHT else -TOLERANCE
            doubt = "" if low > bar or high < bar else " (the interval holds both answers)"
            print(
                f"  {deadline:5} {name:14} {gain.mean():+.4f} [{low:+.4f}, {high:+.4f}], "
                f"better on {wins} of {len(gain)} tables: {verdict(bool(gain.mean() > bar))}{doubt}"
            )
    print("  by task: regret of HyperSched, and of the best other policy")
    for outcome in outcomes:
        cells = []
        for j, deadline in enumerate(DEADLINES):
            means = outcome.regret[:, j, :].mean(axis=1)
            other = int(np.argmin(means[1:])) + 1
            cells.append(f"{deadline}: {means[0]:.3f} {names[other]} {means[other]:.3f}")
        print(f"    {outcome.task:34} " + "; ".join(cells))
    seconds = np.stack([outcome.seconds for outcome in outcomes])
    print(
        f"  one simulation: {seconds.mean():.3f} s of CPU on average, "
        f"longest {seconds.max():.3f} s (0.3 wanted): {verdict(bool(seconds.max() <= 0.3))}"
    )


def bootstrap(gain: Floats, groups: Sequence[npt.NDArray[np.intp]], key: str) -> tuple[float, float]:
    """The middle 95 % of the mean, tasks (groups of tables) drawn first and then seeds within each table."""
    rng = child_rng(0, "bootstrap", key)
    seeds = gain.shape[1]
    means = []
    for _ in range(2000):
        tables = np.concatenate([groups[k] for k in rng.integers(len(groups), size=len(groups))])
        picks = rng.integers(seeds, size=(len(tables), seeds))
        means.append(gain[tables[:, None], picks].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
