"""HyperSched's toy ablation: against ASHA everywhere, and each mechanism switched off in turn.

loss(k) = 1 / (b0 k / 100 + 0.1 b1 + 0.5) + 0.01 b2 + |N(0, 0.005)|, accuracy = (2 - loss) / 2; 4, 8 and 16
GPUs; 10, 20 and 30 s; no, square-root, half and linear scaling; r = 5, R = 500, eta = 4; 0.1 s an iteration.
Every start and resize takes 0.5 s, five iterations, which the paper does not say. Up to 100 trials. Runs are
paired: a seed draws the same trials for everybody. A setting whose difference over 20 seeds is within two
standard errors of nothing is run with 60. ASHA resizes nobody, so it has one result for all scalings.

    .venv/bin/python benchmarks/hypersched_toy.py
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import verdict

from stretto.app.study_file import StudyFile, study_of
from stretto.app.study_run import simulate_study, with_limits
from stretto.worlds.curve_files import load_curves

Floats = npt.NDArray[np.float64]

SEEDS = 20
MORE_SEEDS = 60
ABLATION_SEEDS = 10
GPUS = (4, 8, 16)
DEADLINES_S = (10.0, 20.0, 30.0)
SCALINGS: dict[str, dict[str, float]] = {
    "none": {"1": 1.0, "2": 1.0, "4": 1.0, "8": 1.0, "16": 1.0},
    "sqrt": {"1": 1.0, "2": 1.4, "4": 2.0, "8": 2.8, "16": 4.0},
    "half": {"1": 1.0, "2": 1.0, "4": 2.0, "8": 4.0, "16": 8.0},
    "linear": {"1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0, "16": 16.0},
}
Options = Mapping[str, str]
PUBLISHED: Options = {"published": "true"}
ABLATIONS: dict[str, Options] = {
    "no admission": {"admission": "false"},
    "no reallocation": {"share": "none"},
    "no looking back": {"retrospective": "false"},
    "start time ignored": {"overhead": "false"},
    "linear scaling assumed": {"scaling": "linear"},
}
ABLATION_CELLS = tuple((scaling, 8, 20.0) for scaling in SCALINGS)
Cell = tuple[str, int, float]


def study(scaling: str, gpus: int, deadline_s: float) -> StudyFile:
    file = study_of(
        {
            "study": {"name": "toy", "metric": "accuracy", "direction": "max", "trials": 100},
            "halving": {"rungs": "geometric", "min_epochs": 5, "eta": 4, "max_epochs": 500},
            "space": {"draw": {"float": [0.0, 1.0]}},
            "cluster": {
                "instance": [{"name": "node", "gpus": gpus, "usd_per_hour": 1.0}],
                "max_nodes": 1,
            },
            "profile": {"epoch_s": 0.1, "speedup": SCALINGS[scaling], "start_s": 0.5},
            "world": {"curves": "builtin:toy"},
        },
        Path("toy"),
    )
    return with_limits(file, deadline_s=deadline_s)


@dataclass(frozen=True)
class Lab:
    """Runs the studies of the toy, on two processes."""

    pool: Pool

    def best(self, cell: Cell, policy: str, options: Options, seeds: range) -> Floats:
        """The best accuracy by the deadline, seed by seed."""
        return np.array(self.pool.starmap(best_of, [(cell, policy, options, seed) for seed in seeds]))

    def asha(self, cell: Cell, seeds: range) -> Floats:
        return self.best(("none", *cell[1:]), "asha", {}, seeds)


def best_of(cell: Cell, policy: str, options: Options, seed: int) -> float:
    curves = load_curves("builtin:toy")
    return simulate_study(study(*cell), curves, policy, seed=seed, options=options).result.best_metric or 0.0


def against_asha(lab: Lab) -> int:
    """A table of both, and the number of settings in which HyperSched is above."""
    print(f"  best accuracy, {SEEDS} seeds: asha, hypersched, their paired difference and its standard error")
    print(f"  {'':12}" + "".join(f"{f'{deadline_s:.0f} s':>30}" for deadline_s in DEADLINES_S))
    above = 0
    asha = {
        (gpus, deadline_s): lab.asha(("none", gpus, deadline_s), range(SEEDS))
        for gpus in GPUS
        for deadline_s in DEADLINES_S
    }
    for scaling in SCALINGS:
        for gpus in GPUS:
            texts = []
            for deadline_s in DEADLINES_S:
                cell, theirs = (scaling, gpus, deadline_s), asha[gpus, deadline_s]
                ours = lab.best(cell, "hypersched", {}, range(SEEDS))
                if abs((ours - theirs).mean()) < 2.0 * standard_error(ours - theirs):
                    more = range(SEEDS, MORE_SEEDS)
                    ours = np.concatenate([ours, lab.best(cell, "hypersched", {}, more)])
                    theirs = np.concatenate([theirs, lab.asha(cell, more)])
                gain = ours - theirs
                above += bool(gain.mean() > 0.0)
                again = "*" if gain.size > SEEDS else " "
                means = f"{theirs.mean():.3f} {ours.mean():.3f} {gain.mean():+.3f}"
                texts.append(f"{means}±{standard_error(gain):.3f}{again}")
            print(f"  {scaling:7} {gpus:3d}  " + "".join(f"{text:>30}" for text in texts), flush=True)
    print(f"  * undecided after {SEEDS} seeds: {MORE_SEEDS}")
    return above


def standard_error(sample: Floats) -> float:
    return float(sample.std(ddof=1) / np.sqrt(sample.size))


def one_at_a_time(lab: Lab) -> None:
    """What each mechanism brings: the accuracy that is lost without it."""
    print("\n  accuracy lost without one mechanism, paired:")
    print(f"  published rules, 8 GPUs, 20 s, {ABLATION_SEEDS} seeds")
    print(f"  {'':24}" + "".join(f"{scaling:>16}" for scaling in SCALINGS))
    seeds = range(ABLATION_SEEDS)
    whole = {cell: lab.best(cell, "hypersched", PUBLISHED, seeds) for cell in ABLATION_CELLS}
    print_row("gain over asha", [whole[cell] - lab.asha(cell, seeds) for cell in ABLATION_CELLS])
    for name, options in ABLATIONS.items():
        without = {**PUBLISHED, **options}
        print_row(
            name,
            [whole[cell] - lab.best(cell, "hypersched", without, seeds) for cell in ABLATION_CELLS],
        )


def print_row(name: str, differences: Sequence[Floats]) -> None:
    cells = [f"{one.mean():+.3f}±{standard_error(one):.3f}" for one in differences]
    print(f"  {name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> None:
    print("1. HyperSched's toy ablation")
    settings = len(SCALINGS) * len(GPUS) * len(DEADLINES_S)
    with multiprocessing.Pool(2) as pool:
        lab = Lab(pool)
        above = against_asha(lab)
        one_at_a_time(lab)
    print(f"  above asha in {above} of {settings} settings: {verdict(above == settings)}")


if __name__ == "__main__":
    main()
