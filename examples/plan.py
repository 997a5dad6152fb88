"""The example study: its cost for two deadlines, and the result of two policies after half an hour."""

import math
import tempfile
from pathlib import Path

from stretto import StudyFile, load_curves, plan, read_study, simulate_study
from stretto.inputs.study import EXAMPLE_STUDY


def example_study() -> StudyFile:
    """The study that `stretto init study` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.toml"
        path.write_text(EXAMPLE_STUDY, encoding="utf-8")
        return read_study(path)


def main() -> None:
    study = example_study()
    for hours in (1.5, 3.0):
        chosen = plan(study, deadline=f"{hours}h", budget_usd=math.inf).outcome.chosen
        if chosen is not None:
            nodes = " ".join(str(stage.nodes) for stage in chosen.plan.stages)
            print(f"done in {hours} h for {chosen.cost_usd.mean:.0f} USD, with {nodes} nodes stage by stage")
    curves = load_curves(study.world.curves)
    print(f"{'policy':12}{'accuracy':>9}{'trials':>8}")
    for policy in ("hypersched", "asha"):
        result = simulate_study(study, curves, policy, deadline="30m", budget_usd=math.inf).result
        print(f"{policy:12}{result.best_metric or 0.0:9.2f}{result.trials_started:8}")


if __name__ == "__main__":
    main()
