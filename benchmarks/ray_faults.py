"""Figure: 50 random node kills and additions under 8 running jobs, which must end as if undisturbed.

The nodes are real raylets on this machine with GPUs that do not exist. Eight jobs of one or two workers each
train on them; when one is over, the next one starts. Faults come in an order that the seed decides:

- a node is killed with all its processes, or only its raylet is;
- a node stops silently, and continues after it was given up;
- an agent or a worker is killed;
- a node is added.

At the end every job must have finished with the losses of an undisturbed run. The steps that led there must
have used every example of an epoch once, and nothing before the last checkpoint may be lost. No process,
actor or placement group may be left. A single problem fails the figure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import TEST_HELPERS, verdict

sys.path += TEST_HELPERS
from fault_seen import steps_of
from ray_bench import small_cluster
from ray_fault_inject import NODE_KILLS, Kind, Storm
from ray_fault_judge import pace, problems, restarts, until_known_s
from ray_fault_run import RayRun

NODE_FAULTS = 50
"""Node kills and additions."""
SHARES = {Kind.POWER: 12, Kind.RAYLET: 11, Kind.FROZEN: 2}
OTHERS = (Kind.AGENT, Kind.WORKER)
EVERY = 8
"""One fault of another kind follows after this many faults of nodes."""
NODES, FEWEST, GPUS = 4, 2, 6
"""All jobs find room on the fewest nodes."""
JOBS = 8
EPOCHS = 10
NAP_S = 0.25
"""The length of a step: all jobs share the processor."""
CHECKPOINT_EVERY_S = 2.0


def kinds_in_order(count: int, seed: int) -> list[Kind]:
    """The order of faults: `count` random kills and additions of nodes within the bounds, others between."""
    chance = random.Random(seed)
    pool = [kind for kind, share in SHARES.items() for _ in range(share)]
    kills_to_come = itertools.cycle(chance.sample(pool, len(pool)))
    kinds: list[Kind] = []
    nodes = NODES
    for number in range(1, count + 1):
        kills = nodes == NODES or (nodes > FEWEST and chance.random() < 0.5)
        nodes += -1 if kills else 1
        kinds.append(next(kills_to_come) if kills else Kind.ADD)
        if number % EVERY == 0:
            kinds.append(chance.choice(OTHERS))
    return kinds


def table(storm: Storm, run: RayRun) -> None:
    """Prints the faults; the last columns are for jobs with workers there, except those almost done."""
    steps = steps_of(run.folder.path)
    print(f"  {'fault':38} {'number':>6} {'jobs':>5} {'trained on':>10} {'median s':>9} {'worst s':>8}")
    for kind in Kind:
        faults = [fault for fault in storm.faults if fault.kind is kind]
        again = sorted(time_s for fault in faults for time_s in fault.again_s(steps).values())
        times = f"{statistics.median(again):9.2f} {again[-1]:8.2f}" if again else ""
        struck = sum(len(fault.jobs) for fault in faults)
        print(f"  {kind:38} {len(faults):>6} {struck:>5} {len(again):>10} {times}")


def report(storm: Storm, run: RayRun, wanted: int) -> bool:
    """Whether the figure is reached."""
    found = [*storm.problems, *problems(run, storm.faults)]
    table(storm, run)
    all_times = [t for fault in storm.faults for t in fault.again_s(steps_of(run.folder.path)).values()]
    known_s = until_known_s(run, [fault for fault in storm.faults if fault.kind in NODE_KILLS])
    print(f"  median from a kill until its node is known to be lost: {statistics.median(known_s):.2f} s")
    print(f"  median from a kill to training again: {statistics.median(all_times):.2f} s")
    begun, slowest = restarts(run, storm.faults), pace(run, storm.faults)
    lost_s = sorted(one.lost_s for one in begun)
    bound_s = run.checkpoint_every_s + slowest.save_s + slowest.step_s
    for problem in found:
        print(f"  problem: {problem}")
    print(
        f"  a checkpoint every {run.checkpoint_every_s:g} s; the longest took {slowest.save_s:.2f} s to save "
        f"and the longest step {slowest.step_s:.2f} s"
    )
    print(
        f"  training lost by a restart: median {statistics.median(lost_s):.2f} s, worst {lost_s[-1]:.2f} s, "
        f"at most {bound_s:.2f} s wanted: {verdict(lost_s[-1] <= bound_s)}"
    )
    nodes = sum(fault.kind in {*NODE_KILLS, Kind.ADD} for fault in storm.faults)
    right = not found and nodes == wanted
    print(f"  {len(found)} problems over {nodes} kills and adds of nodes, 0 wanted: {verdict(right)}")
    return right and lost_s[-1] <= bound_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=NODE_FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="leave the run's files in this folder")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="stretto-ray-faults-") as temporary,
        small_cluster((GPUS,) * NODES) as cluster,
    ):
        run = RayRun(
            (given.keep or Path(temporary)) / "run",
            at_once=JOBS,
            epochs=EPOCHS,
            nap_s=NAP_S,
            checkpoint_every_s=CHECKPOINT_EVERY_S,
        )
        storm = Storm(run, cluster, gpus=GPUS, seed=given.seed)
        storm.rage(kinds_in_order(given.faults, given.seed))
        print(f"Faults on Ray: {len(storm.faults)} in {time.monotonic() - began_s:.0f} s")
        reached = report(storm, run, given.faults)
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
