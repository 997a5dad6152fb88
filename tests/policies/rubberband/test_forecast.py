"""What the planner foretells against what the executor does, in simulated worlds that are as believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stretto.policies.rubberband.drift as planning_seam
from stretto.inputs.study import StudyFile, study_of
from stretto.planning.forecast import Outcome
from stretto.planning.profile import Estimate
from stretto.simulation.plan import plan
from stretto.simulation.studies import simulate_study
from stretto.worlds.curve_files import load_curves

pytestmark = pytest.mark.slow

RUNS = 60


def study_file(rungs: list[int], limits: dict[str, int]) -> StudyFile:
    """Eight trials of which several are left in the last stage."""
    return study_of(
        {
            "study": {"name": "s", "metric": "accuracy", "direction": "max", "trials": 8},
            "halving": {"rungs": rungs, "eta": 2, "max_epochs": 14},
            "space": {"lr": {"float": [0.09, 0.11]}},
            "cluster": {
                "instance": [{"name": "two", "gpus": 2, "usd_per_hour": 6.0}],
                "max_nodes": 4,
                "queue_s": {"mean": 10, "sd": 3},
                "init_s": {"mean": 20, "sd": 5},
            },
            "limits": limits,
            "profile": {
                "epoch_s": {"mean": 20.0, "trial_sd": 5.0, "node_sd": 1.0, "epoch_sd": 1.0},
                "speedup": {"1": 1.0, "2": 1.8},
                "start_s": 5.0,
            },
        },
        Path("study.toml"),
    )


def share_within(values: list[float], believed: Estimate) -> float:
    return sum(believed.p10 <= value <= believed.p90 for value in values) / len(values)


@pytest.mark.parametrize(("rungs", "deadline_s"), [([], 600), ([5], 500), ([2, 6], 450)])
def test_executions_take_and_cost_what_was_foretold(
    rungs: list[int], deadline_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is for a deadline, but its executions are not cut off there."""
    file, curves = study_file(rungs, {}), load_curves("builtin:resnet")
    outcome = plan(study_file(rungs, {"deadline": deadline_s})).outcome
    chosen = outcome.chosen
    assert chosen is not None
    assert chosen.plan.stages[-1].nodes > 1

    def as_planned(*_: object, **__: object) -> Outcome:
        return outcome

    monkeypatch.setattr(planning_seam, "plan_study", as_planned)
    results = [
        simulate_study(file, curves, "rubberband", seed=seed, options={"replan": "0"}).result
        for seed in range(RUNS)
    ]
    costs, finishes = [one.cost_usd for one in results], [one.finished_s for one in results]
    assert np.mean(costs) == pytest.approx(chosen.cost_usd.mean, rel=0.04)
    assert np.mean(finishes) == pytest.approx(chosen.finish_s.mean, rel=0.04)
    assert 0.65 <= share_within(costs, chosen.cost_usd) <= 0.92
    assert 0.65 <= share_within(finishes, chosen.finish_s) <= 0.92
