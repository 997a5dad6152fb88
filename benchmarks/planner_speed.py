"""Figure 4: how long it takes to plan a large study on one core.

SHA(64, r=4, eta=2): seven stages; four instance types of 1, 4, 8 and 8 GPUs; up to 128 nodes, so that there
are 128 GPUs even of the smallest.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np
from common import verdict
from threadpoolctl import threadpool_limits

from stretto.planning.planner import Planner, plan_study
from stretto.planning.profile import Latency, Profile, Scaling, Spread
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance
from stretto.search.halving import halving_epochs, make_rungs
from stretto.search.study import Direction, Study

LIMIT_S = 2.0
MAX_EPOCHS = halving_epochs(64, min_epochs=4, eta=2)
STUDY = Study(
    name="large",
    metric="accuracy",
    direction=Direction.MAX,
    trials=64,
    rungs=make_rungs("additive", min_epochs=4, eta=2, max_epochs=MAX_EPOCHS),
    eta=2,
    max_epochs=MAX_EPOCHS,
)
PROFILE = Profile(
    latency=Latency(epoch_s=35.0, trial_sd=0.1, node_sd=0.05, epoch_sd=0.05),
    scaling=Scaling(((1, 1.0), (2, 1.87), (4, 3.3), (8, 4.8), (16, 6.0)), spanning=0.1),
    start_s=10.0,
    queue_s=Spread(40.0, 10.0),
    init_s=Spread(30.0, 8.0),
)
INSTANCES = (
    Instance(name="p3.2xlarge", gpus=1, usd_per_hour=3.06),
    Instance(name="p3.8xlarge", gpus=4, usd_per_hour=12.24),
    Instance(name="p3.16xlarge", gpus=8, usd_per_hour=24.48),
    Instance(name="p4d.24xlarge", gpus=8, usd_per_hour=32.77, speed=1.9),
)


def planning_s(deadline_s: float, per: Per, planner: Planner) -> float:
    """CPU time of one plan."""
    tuning = Tuning(
        study=STUDY,
        profile=PROFILE,
        instances=INSTANCES,
        max_nodes=128,
        billing=Billing(per=per),
        limits=Limits(deadline_s=deadline_s),
    )
    began_s = time.process_time()
    plan_study(tuning, np.random.default_rng(0), planner=planner)
    return time.process_time() - began_s


def main() -> None:
    print("Figure 4: time to plan SHA(64, 4, 2), 7 stages, 4 instance types, one core")
    with threadpool_limits(1):
        for planner in ("search", "published"):
            times = {
                (per, deadline_s): planning_s(deadline_s, per, planner)
                for per, deadline_s in product(Per, (2400.0, 3600.0, 7200.0, 14400.0))
            }
            for per in Per:
                mine = [f"{seconds:5.2f}" for (own, _), seconds in times.items() if own is per]
                print(f"  {planner:10} per {per:9} deadlines 40m, 1h, 2h, 4h: {' '.join(mine)} s of CPU")
            slowest_s = max(times.values())
            if planner == "search":
                print(f"  slowest {slowest_s:.2f} s: {verdict(slowest_s < LIMIT_S)} ({LIMIT_S:g} s)")


if __name__ == "__main__":
    main()
