"""Studies to plan, small enough to think through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution
from stretto.planning.forecast import Outcome, StudyProgress
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.planner import LimitRule, Planner, plan_study
from stretto.planning.profile import Latency, Profile, Scaling, Spread
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Billing
from stretto.pricing.instances import Instance
from stretto.search.halving import halving_epochs, make_rungs
from stretto.search.study import Direction, Study, halving_stages

POOR = Scaling(((1, 1.0), (2, 1.87), (4, 3.3), (8, 4.8), (16, 6.0)), spanning=0.1)
"""Within a node nearly linear, across nodes not."""
LINEAR = Scaling(tuple((gpus, gpus**0.98) for gpus in (1, 2, 4, 8, 16, 32)))
P3_8XLARGE = Instance(name="p3.8xlarge", gpus=4, usd_per_hour=12.24)

CLOUD = Profile(
    latency=Latency(epoch_s=35.0, trial_sd=0.1, node_sd=0.05, epoch_sd=0.05),
    scaling=POOR,
    start_s=10.0,
    queue_s=Spread(40.0, 10.0),
    init_s=Spread(30.0, 8.0),
)
STEADY = Profile(
    latency=Latency(epoch_s=10.0),
    scaling=POOR,
    start_s=3.0,
    queue_s=Spread(20.0),
    init_s=Spread(30.0),
)
"""Nothing varies."""


def sha(trials: int, min_epochs: int, eta: int) -> Study:
    """SHA(n, r, eta) with additive rungs."""
    max_epochs = halving_epochs(trials, min_epochs=min_epochs, eta=eta)
    return Study(
        name="sha",
        metric="accuracy",
        direction=Direction.MAX,
        trials=trials,
        rungs=make_rungs("additive", min_epochs=min_epochs, eta=eta, max_epochs=max_epochs),
        eta=eta,
        max_epochs=max_epochs,
    )


def flat(trials: int, epochs: int) -> Study:
    """No comparisons: one stage."""
    return replace(sha(trials, 1, 2), rungs=(), max_epochs=epochs)


def tuned(
    study: Study,
    profile: Profile = CLOUD,
    *,
    instances: tuple[Instance, ...] = (P3_8XLARGE,),
    max_nodes: int = 16,
    billing: Billing | None = None,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
) -> Tuning:
    return Tuning(
        study=study,
        profile=profile,
        instances=instances,
        max_nodes=max_nodes,
        billing=billing or Billing(),
        limits=Limits(deadline_s=deadline_s, budget_usd=budget_usd),
    )


def rows(study: Study, *gives: tuple[int, int, int], instance: str = P3_8XLARGE.name) -> Plan:
    """A plan of (GPUs per trial, trials at once, nodes) for every stage."""
    return Plan(
        tuple(
            StagePlan(
                first_epoch=stage.first_epoch,
                last_epoch=stage.last_epoch,
                trials=stage.trials,
                gpus_per_trial=gpus,
                at_once=at_once,
                nodes=nodes,
                instance=instance,
            )
            for stage, (gpus, at_once, nodes) in zip(halving_stages(study), gives, strict=True)
        )
    )


def executed(tuning: Tuning, samples: int = 1, start: StudyProgress | None = None) -> Execution:
    return Execution(tuning, draw_study(tuning, np.random.default_rng(0), samples, start), start)


def planned(
    tuning: Tuning,
    planner: Planner = "search",
    *,
    rule: LimitRule = "quantile",
    start: StudyProgress | None = None,
    seed: int = 0,
) -> Outcome:
    return plan_study(tuning, np.random.default_rng(seed), planner=planner, rule=rule, start=start)
