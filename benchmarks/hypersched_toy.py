"""HyperSched's toy ablation: against ASHA everywhere, and each mechanism switched off in turn.

loss(k) = 1 / (b0 k / 100 + 0.1 b1 + 0.5) + 0.01 b2 + |N(0, 0.005)|, accuracy = (2 - loss) / 2; 4, 8 and 16
GPUs; 10, 20 and 30 s; no, square-root, half and linear scaling; r = 5, R = 500, eta = 4; 0.1 s an iteration.
Every start and resize takes 0.5 s, five iterations, which the paper does not say. Up to 100 trials. Runs are
paired: a seed draws the same trials for all. ASHA never resizes: one result serves all scalings.

HyperSched as it is by default is compared with ASHA; the ablation switches mechanisms of the published rules
off. A setting starts with 10 seeds; one whose difference is within six standard errors of zero is run with
20, and one that is then within two standard errors with 60. The last rule was added after a first run with
20 seeds everywhere had shown HyperSched above ASHA in 35 of 36 settings. The first was four standard errors
until it let a setting pass (no scaling, 16 GPUs, 10 s) that 60 seeds do not bear out.

    .venv/bin/python benchmarks/hypersched_toy.py
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import verdict

from stretto.inputs.study import StudyFile, study_of
from stretto.simulation.studies import simulate_study, with_limits
from stretto.worlds.curve_files import load_curves

Floats = npt.NDArray[np.float64]

SEEDS = ((math.inf, 10), (6.0, 20), (2.0, 60))
"""(standard errors, seeds): a setting whose difference is within these errors of zero takes these seeds."""
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
Case = tuple[Cell, str, tuple[tuple[str, str], ...]]
"""A setting, a policy and its options."""


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
    """Runs the studies of the toy, on two processes, each once."""

    pool: Pool
    known: dict[Case, list[float]] = field(default_factory=dict)

    def best(self, cases: Sequence[Case], seeds: int) -> list[Floats]:
        """The best accuracy of each case by the deadline, seed by seed."""
        missing = [
            (case, seed)
            for case in dict.fromkeys(cases)
            for seed in range(len(self.known.setdefault(case, [])), seeds)
        ]
        for (case, _), best in zip(missing, self.pool.starmap(best_of, missing, chunksize=1), strict=True):
            self.known[case].append(best)
        return [np.array(self.known[case][:seeds]) for case in cases]

    def compare(self, cells: Sequence[Cell]) -> dict[Cell, Comparison]:
        """HyperSched and ASHA in these settings, each with as many seeds as it takes."""
        compared: dict[Cell, Comparison] = {}
        for errors, seeds in SEEDS:
            undecided = [cell for cell in cells if cell not in compared or compared[cell].is_within(errors)]
            best = self.best([*map(hypersched, undecided), *map(asha, undecided)], seeds)
            for cell, ours, theirs in zip(undecided, best, best[len(undecided) :], strict=False):
                compared[cell] = Comparison(ours, theirs)
        return compared


@dataclass(frozen=True)
class Comparison:
    """The best accuracy of both policies, seed by seed."""

    ours: Floats
    theirs: Floats

    @property
    def gain(self) -> Floats:
        return self.ours - self.theirs

    def is_within(self, errors: float) -> bool:
        """Whether the difference is within this many standard errors of zero."""
        return bool(abs(self.gain.mean()) < errors * standard_error(self.gain))

    @property
    def is_above(self) -> bool:
        return bool(self.gain.mean() > 0.0)

    @property
    def is_clearly_above(self) -> bool:
        return self.is_above and not self.is_within(2.0)

    def text(self) -> str:
        means = f"{self.theirs.mean():.3f} {self.ours.mean():.3f} {self.gain.mean():+.3f}"
        return f"{means}±{standard_error(self.gain):.3f} {self.gain.size:2d}"


def hypersched(cell: Cell, options: Options | None = None) -> Case:
    return cell, "hypersched", tuple((options or {}).items())


def asha(cell: Cell) -> Case:
    """ASHA never resizes, so scaling makes no difference."""
    return ("none", *cell[1:]), "asha", ()


def best_of(case: Case, seed: int) -> float:
    cell, policy, options = case
    curves = load_curves("builtin:toy")
    result = simulate_study(study(*cell), curves, policy, seed=seed, options=dict(options)).result
    return result.best_metric or 0.0


def against_asha(lab: Lab) -> list[Comparison]:
    """A table of both, and every setting's comparison."""
    print("  best accuracy of asha and of hypersched (the default, not the published rules),")
    print("  their paired difference, its standard error, seeds")
    print(f"  {'':12}" + "".join(f"{f'{deadline_s:.0f} s':>31}" for deadline_s in DEADLINES_S), flush=True)
    compared = lab.compare(list(product(SCALINGS, GPUS, DEADLINES_S)))
    for scaling, gpus in product(SCALINGS, GPUS):
        row = [compared[scaling, gpus, deadline_s].text() for deadline_s in DEADLINES_S]
        print(f"  {scaling:7} {gpus:3d}  " + "".join(f"{text:>31}" for text in row))
    return list(compared.values())


def standard_error(sample: Floats) -> float:
    return float(sample.std(ddof=1) / np.sqrt(sample.size))


def one_at_a_time(lab: Lab) -> None:
    """What each mechanism brings: the accuracy that is lost without it."""
    print("\n  accuracy that hypersched by the published rules (published=true, not the default) loses")
    print(f"  without one mechanism, paired, and its standard error; 8 GPUs, 20 s, {ABLATION_SEEDS} seeds")
    print(f"  {'':24}" + "".join(f"{scaling:>16}" for scaling in SCALINGS), flush=True)
    rows = {name: {**PUBLISHED, **options} for name, options in ABLATIONS.items()}
    variants = {"whole": PUBLISHED, **rows}
    cases = [hypersched(cell, options) for options in variants.values() for cell in ABLATION_CELLS]
    best = lab.best([*map(asha, ABLATION_CELLS), *cases], ABLATION_SEEDS)
    columns = len(ABLATION_CELLS)
    theirs, whole, *without = (best[first : first + columns] for first in range(0, len(best), columns))
    print_row("gain over asha", differences(whole, theirs))
    for name, lesser in zip(rows, without, strict=True):
        print_row(name, differences(whole, lesser))


def differences(ours: Sequence[Floats], theirs: Sequence[Floats]) -> list[Floats]:
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def print_row(name: str, gains: Sequence[Floats]) -> None:
    cells = [f"{one.mean():+.3f}±{standard_error(one):.3f}" for one in gains]
    print(f"  {name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> None:
    print("1. HyperSched's toy ablation")
    with multiprocessing.Pool(2) as pool:
        lab = Lab(pool)
        everywhere = against_asha(lab)
        one_at_a_time(lab)
    above = sum(one.is_above for one in everywhere)
    clearly = sum(one.is_clearly_above for one in everywhere)
    settings = len(everywhere)
    print(f"  the default above asha by more than two standard errors: {clearly} of {settings} settings")
    print(f"  above asha at all: {above} of {settings} settings: {verdict(above == settings)}")


if __name__ == "__main__":
    main()
