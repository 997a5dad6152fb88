"""Figure 2: the engine against a genetic algorithm and an upper bound, on stored decision inputs."""

from __future__ import annotations

import re
from pathlib import Path

from common import data_folder, verdict

from stretto.inputs.snapshot import read_snapshot
from stretto.simulation.decide import decide

ROUNDING = 0.5e-5
"""Reference values are printed with five digits."""


def references(readme: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The genetic algorithm's fitness and the upper bound of each input, from the tables beside the data."""
    genetic: dict[str, float] = {}
    bound: dict[str, float] = {}
    for line in readme.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| \n").split("|")]
        if not re.match(r"(real-\d|j\d)", cells[0]):
            continue
        names = [name.strip() for name in cells[0].split("/")]
        fitness_column, bound_column = (3, 4) if names[0].startswith("real") else (2, 3)
        for position, name in enumerate(names):
            key = name if name.startswith("real") else f"synth-{name}"
            _keep(genetic, key, cells[fitness_column], position)
            _keep(bound, key, cells[bound_column], position)
    return genetic, bound


def _keep(into: dict[str, float], key: str, cell: str, position: int) -> None:
    parts = cell.split("/")
    number = re.search(r"0\.\d+", parts[position] if position < len(parts) else "")
    if number:
        into[key] = float(number.group())


def main() -> None:
    print("Figure 2: fitness of one pollux decision (the settings that figure 3 is timed with)")
    data = data_folder("allocation")
    if data is None:
        print("  skipped: the decision inputs are missing (STRETTO_DATA)")
        return
    genetic, bound = references(data / "README.md")
    reached = True
    for path in sorted(data.glob("*.json")):
        answer = decide(read_snapshot(path), "pollux")
        fitness = answer.objective or 0.0
        name = path.stem
        against = []
        if name in genetic:
            reached &= fitness >= genetic[name] - ROUNDING
            against.append(f"x{fitness / genetic[name]:.4f} of the genetic algorithm")
        if name in bound:
            reached &= name.startswith("real") or fitness >= 0.99 * bound[name] - ROUNDING
            against.append(f"x{fitness / bound[name]:.4f} of the bound")
        print(f"  {name:20s} {fitness:.6f} in {answer.decision_ms:6.1f} ms  {', '.join(against)}")
    print(f"  never below the genetic algorithm, 0.99 of the bound on synth inputs: {verdict(reached)}")


if __name__ == "__main__":
    main()
