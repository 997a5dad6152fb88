"""The example study: what it will take by two deadlines, and what two policies make of half an hour."""

import dataclasses
import tempfile
from pathlib import Path

from stretto import plan, read_study, simulate_study
from stretto.app.study_file import EXAMPLE_STUDY, StudyFile
from stretto.worlds.curve_files import load_curves

HOUR_S = 3600.0


def example_study() -> StudyFile:
    """What `stretto init study` writes, without its budget."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.toml"
        path.write_text(EXAMPLE_STUDY, encoding="utf-8")
        file = read_study(path)
    return until(file, hours=2.0)


def until(file: StudyFile, *, hours: float) -> StudyFile:
    limits = dataclasses.replace(file.tuning.limits, deadline_s=hours * HOUR_S, budget_usd=None)
    return dataclasses.replace(file, tuning=dataclasses.replace(file.tuning, limits=limits))


def main() -> None:
    study = example_study()
    for hours in (1.5, 3.0):
        chosen = plan(until(study, hours=hours)).outcome.chosen
        if chosen is not None:
            nodes = " ".join(str(stage.nodes) for stage in chosen.plan.stages)
            print(f"done in {hours} h for {chosen.cost_usd.mean:.0f} USD, with {nodes} nodes stage by stage")
    curves = load_curves(study.world.curves)
    print(f"{'policy':12}{'accuracy':>9}{'trials':>8}")
    for policy in ("hypersched", "asha"):
        result = simulate_study(until(study, hours=0.5), curves, policy).result
        print(f"{policy:12}{result.best_metric or 0.0:9.2f}{result.trials_started:8}")


if __name__ == "__main__":
    main()
