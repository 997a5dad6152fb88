"""HyperSched in its published setting: ResNet-50 on CIFAR-10, 8 GPUs, deadlines of 900, 1800 and 3600 s.

r = 2, R = 200, eta = 4; speed-up 1, 1.87, 3.42, 5.60 with 1, 2, 4, 8 GPUs; 35 s an epoch and 60 s a start; up
to 100 configurations of the published grid; synthetic curves (builtin:cifar), so accuracies compare policies
with each other and not with the paper. As published, scores are means of five results. 10 seeds, paired.

    .venv/bin/python benchmarks/hypersched_published.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from common import verdict

from stretto.inputs.study import StudyFile, study_of
from stretto.simulation.studies import StudyResult, simulate_study, with_limits
from stretto.worlds.curve_files import load_curves
from stretto.worlds.curves import Curves

SEEDS = 10
PAPER = {900.0: 14, 1800.0: 20, 3600.0: 33}
"""The number of trials for each deadline."""
WITHIN, OF_ASHA = 0.2, 0.45
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "hypersched, published": ("hypersched", {"published": "true", "score_window": "5"}),
    "hypersched": ("hypersched", {"score_window": "5"}),
    "asha": ("asha", {}),
}


def study() -> StudyFile:
    return study_of(
        {
            "study": {"name": "published", "metric": "accuracy", "direction": "max", "trials": 100},
            "halving": {"rungs": "geometric", "min_epochs": 2, "eta": 4, "max_epochs": 200},
            "space": {
                "lr": {"choice": [1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0]},
                "wd": {"choice": [1e-4, 5e-4, 1e-3, 5e-3]},
                "momentum": {"choice": [0.9, 0.95, 0.99, 0.997]},
            },
            "cluster": {"instances": ["p3.16xlarge"], "max_nodes": 1},
            "profile": {
                "epoch_s": 35.0,
                "speedup": {"1": 1.0, "2": 1.87, "4": 3.42, "8": 5.6},
                "start_s": 60.0,
            },
            "world": {"curves": "builtin:cifar"},
        },
        Path("published"),
    )


def results(file: StudyFile, curves: Curves, deadline_s: float, case: str) -> list[StudyResult]:
    policy, options = CASES[case]
    limited = with_limits(file, deadline_s=deadline_s)
    return [
        simulate_study(limited, curves, policy, seed=seed, options=options).result for seed in range(SEEDS)
    ]


def main() -> None:
    file = study()
    curves = load_curves(file.world.curves)
    print(f"1. HyperSched as published: trials started and best accuracy, {SEEDS} seeds")
    print(
        f"  {'deadline':>8} {'paper':>6}  " + "".join(f"{case:>24}" for case in CASES) + "  share of asha's"
    )
    near = few = better = True
    for deadline_s, paper in PAPER.items():
        rows = {case: results(file, curves, deadline_s, case) for case in CASES}
        started = {case: np.mean([one.trials_started for one in rows[case]]) for case in CASES}
        best = {case: np.mean([one.best_metric or 0.0 for one in rows[case]]) for case in CASES}
        ours = started["hypersched, published"]
        cells = "".join(f"{started[case]:15.1f}  {best[case]:.4f} " for case in CASES)
        print(f"  {deadline_s:6.0f} s {paper:6d}  {cells}  {ours / started['asha']:.2f}")
        near &= bool(abs(ours - paper) <= WITHIN * paper)
        few &= bool(ours <= OF_ASHA * started["asha"])
        better &= bool(best["hypersched, published"] > best["asha"])
    print(f"  trials within 20 % of the paper's: {verdict(near)}")
    print(f"  at most 45 % of asha's: {verdict(few)}")
    print(f"  a better model than asha at every deadline: {verdict(better)}")


if __name__ == "__main__":
    main()
