"""Figure: 64 short trials on a Ray cluster, with Stretto and with Ray Tune (reuse_actors on).

Both use the same running cluster of one node: once with eight slots, as many nodes have GPUs, and once with
two, the number of this machine's cores. Each side is a process that has imported what it needs. We measure
from the call that tunes to its return. This includes the start of Ray Tune's actors, or of our agents and
workers, their imports of torch, every trial, and the results. Sides take turns.

Most of the time is importing torch: Ray Tune does so in every actor, Stretto once per node. If every slot has
a core, actors import at the same time, so there Ray Tune is closer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import verdict

HERE = Path(__file__).parent
TRIALS = 64
SLOTS = (8, 2)
WANTED = 3.0
STUDY = f"""
[study]
name = "short"
metric = "loss"
direction = "min"
trials = {TRIALS}
entry = "{HERE}/ray_trials_train.py:train"
[halving]
rungs = []
eta = 2
max_epochs = 3
[space]
lr = {{ log = [1e-3, 1e-1] }}
[profile]
epoch_s = 0.02
speedup = {{ "1" = 1.0 }}
"""


def stretto_side(address: str, folder: Path) -> dict[str, Any]:
    from stretto.launch.tune import tune  # noqa: PLC0415 - in a process of its own
    from stretto.substrate.ray.cluster import connected  # noqa: PLC0415

    path = folder / "short.toml"
    path.write_text(STUDY, encoding="utf-8")
    with connected(address):
        began_s = time.monotonic()
        result = tune(path, policy="random", folder=folder / "runs", on=f"ray:{address}")
        return {"wall_s": time.monotonic() - began_s, "done": result.trials_by_state.get("finished", 0)}


def ray_side(address: str, folder: Path) -> dict[str, Any]:
    import ray  # noqa: PLC0415 - in a process of its own
    from ray import tune  # noqa: PLC0415
    from ray_trials_train import ray_trial  # noqa: PLC0415

    ray.init(
        address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}},
    )
    tuner = tune.Tuner(
        tune.with_resources(ray_trial, {"cpu": 1}),
        param_space={"lr": tune.loguniform(1e-3, 1e-1)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=TRIALS, reuse_actors=True),
        run_config=tune.RunConfig(name="short", storage_path=str(folder), verbose=0),
    )
    began_s = time.monotonic()
    results = tuner.fit()
    return {"wall_s": time.monotonic() - began_s, "done": len(results) - results.num_errors}


def measure(side: str, address: str) -> float:
    with tempfile.TemporaryDirectory(prefix="stretto-trials-") as folder:
        words = [sys.executable, __file__, "--side", side, "--address", address, "--folder", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - this file
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["done"] == TRIALS, answer
    wall_s: float = answer["wall_s"]
    return wall_s


def compare(slots: int, rounds: int) -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    os.environ.update({"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"})
    head = {"num_cpus": slots, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        pairs = [
            (measure("ray", cluster.address), measure("stretto", cluster.address)) for _ in range(rounds)
        ]
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    for theirs_s, ours_s in pairs:
        print(f"  Ray Tune {theirs_s:6.1f} s   Stretto {ours_s:6.1f} s   {theirs_s / ours_s:.1f}")
    ratio = statistics.median(theirs_s / ours_s for theirs_s, ours_s in pairs)
    print(f"{TRIALS} short trials, {slots} slots: {ratio:.1f} times faster, {WANTED:g} wanted: ", end="")
    print(verdict(ratio >= WANTED), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
    for word in ("--side", "--address", "--folder"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is None:
        for slots in given.slots:
            compare(slots, given.rounds)
        return
    side = stretto_side if given.side == "stretto" else ray_side
    print(json.dumps(side(given.address, Path(given.folder))))


if __name__ == "__main__":
    main()
