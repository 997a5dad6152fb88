"""Figure: Stretto against Ray Tune (reuse_actors on) on two slots of this machine, in the same run.

Trivial trials show what a trial costs beyond its training.

- "Everything" is from the call to its return, including the start of Ray's cluster and of our fork server.
- "Started" leaves that start out: Ray's `fit` on a running cluster, and ours from the first result on, as a
  fork server forks a trial in milliseconds once it has its imports.
- "Results" is from the first result to the last on both sides, so without the start of Ray's actors, too.

Then a study: the same configurations in the same order, the same network, deadline and slots; ASHA on Ray's
side, HyperSched and ASHA on ours. Runs take turns. Ray's cluster runs before its deadline begins.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import verdict
from scipy.stats import t

from stretto.core.events import JobFinished, JobReported
from stretto.inputs.study import read_outline
from stretto.launch.tune import tune
from stretto.runs.folder import RunFolder
from stretto.search.samplers import make_sampler

HERE = Path(__file__).parent
TRIALS = 100
REPORTS = (1, 3)
WANTED = 10.0
ROUNDS = 3
SEEDS = 10
DEADLINE_S = 12.0
POLICIES = ("hypersched", "asha")

TRIVIAL = """
[study]
name = "trivial"
metric = "accuracy"
direction = "max"
trials = {trials}
entry = "{here}/ray_tune_trivial.py:trivial"
[halving]
rungs = []
eta = 2
max_epochs = {reports}
[space]
x = {{ float = [0.0, 1.0] }}
reports = {{ choice = [{reports}] }}
[profile]
epoch_s = 0.01
speedup = {{ "1" = 1.0 }}
[machine]
slots = 2
"""

STUDY = f"""
[study]
name = "digits"
metric = "accuracy"
direction = "max"
trials = 60
entry = "{HERE}/ray_tune_train.py:train"
[halving]
rungs = "geometric"
min_epochs = 1
eta = 3
max_epochs = 27
[space]
lr = {{ log = [1e-3, 1.0] }}
momentum = {{ choice = [0.0, 0.8, 0.9, 0.95] }}
dropout = {{ float = [0.0, 0.7] }}
[profile]
epoch_s = {{ mean = 0.25, sd = 0.05 }}
speedup = {{ "1" = 1.0, "2" = 1.3 }}
start_s = 0.3
[machine]
slots = 2
"""


@dataclass(frozen=True)
class Times:
    """Times of a hundred trivial trials."""

    everything_s: float
    started_s: float
    results_s: float


class Ray:
    """Ray Tune in a process of its own; what it prints goes to a file."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "ray.log").open("ab")
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, str(HERE / "ray_tune_side.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"Ray Tune ended: {Path(self._log.name).read_text(encoding='utf-8')[-2000:]}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """Stops Ray Tune; its cluster ends with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running_ray(folder: Path) -> Iterator[Ray]:
    ray = Ray(folder)
    try:
        yield ray
    finally:
        ray.close()


def our_trivial(folder: Path, reports: int, number: int) -> Times:
    path = folder / f"trivial-{reports}-{number}.toml"
    path.write_text(TRIVIAL.format(trials=TRIALS, here=HERE, reports=reports), encoding="utf-8")
    began_s = time.monotonic()
    result = tune(path, policy="random", name=path.stem, folder=folder)
    everything_s = time.monotonic() - began_s
    assert result.trials_by_state == {"finished": TRIALS}, result.trials_by_state
    events = list(RunFolder(result.run).events())
    results_s = [event.t_s for event in events if isinstance(event, JobReported)]
    last_s = max(event.t_s for event in events if isinstance(event, JobFinished))
    return Times(everything_s, last_s - min(results_s), max(results_s) - min(results_s))


def ray_trivial(ray: Ray, reports: int) -> Times:
    answer = ray.ask(trivial=TRIALS, reports=reports)
    assert (answer["trials"], answer["errors"]) == (TRIALS, 0), answer
    results_s = answer["last_s"] - answer["first_s"]
    return Times(answer["init_s"] + answer["fit_s"], answer["fit_s"], results_s)


def compare_trivial(folder: Path, ray: Ray, rounds: int) -> None:
    print(f"{TRIALS} trivial trials on 2 slots: seconds, and how many times faster, medians of {rounds}")
    print(f"  {'':24} {'Ray Tune':>9} {'Stretto':>8} {'ratio':>6}")
    for reports in REPORTS:
        pairs = [
            (ray_trivial(ray, reports), our_trivial(folder, reports, number)) for number in range(rounds)
        ]
        for name in ("everything", "started", "results"):
            theirs_s, ours_s = (
                [getattr(one, f"{name}_s") for one in side] for side in zip(*pairs, strict=True)
            )
            ratio = statistics.median(a / b for a, b in zip(theirs_s, ours_s, strict=True))
            label = f"{reports} report{'s' * (reports > 1)}, {name}"
            print(
                f"  {label:24} {statistics.median(theirs_s):>9.1f} {statistics.median(ours_s):>8.2f} ", end=""
            )
            wanted = f"  at least {WANTED:g} times: {verdict(ratio >= WANTED)}" if name == "started" else ""
            print(f"{ratio:>6.1f}{wanted}", flush=True)


def configurations(path: Path, seed: int) -> list[dict[str, Any]]:
    """The configurations that our study will draw, so that Ray Tune tries the same."""
    outline = read_outline(path)
    sampler = make_sampler(outline.sampler, outline.space, outline.study, seed)
    return [dict(sampler.ask(number)) for number in range(outline.study.trials)]


def compare_studies(folder: Path, ray: Ray, seeds: int, deadline_s: float) -> None:
    path = folder / "digits.toml"
    path.write_text(STUDY, encoding="utf-8")
    print(f"A study on 2 slots until {deadline_s:g} s: best accuracy found, {seeds} seeds")
    print("  (in brackets: seconds until Ray Tune's first result; ours load torch within the deadline, too)")
    print(f"  {'seed':>4} {'Ray ASHA':>16} " + " ".join(f"{policy:>11}" for policy in POLICIES))
    differences: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(seeds):
        answer = ray.ask(study=configurations(path, seed), deadline_s=deadline_s, epochs=27)
        theirs, first_s = answer["best"], answer["first_s"]
        cells = [f"{theirs:9.4f} {'(none)' if first_s is None else f'({first_s:.1f})':>6}"]
        for policy in POLICIES:
            run = tune(
                path, policy=policy, deadline=deadline_s, seed=seed, name=f"{policy}-{seed}", folder=folder
            )
            best = run.best_metric or 0.0
            differences[policy].append(best - theirs)
            cells.append(f"{best:11.4f}")
        print(f"  {seed:>4} {' '.join(cells)}", flush=True)
    for policy, found in differences.items():
        mean, half = statistics.mean(found), interval(found)
        print(f"  {policy} above Ray Tune by {mean:+.4f} +- {half:.4f} (90 %)")
    print(f"  hypersched not below: {verdict(statistics.mean(differences['hypersched']) >= 0)}")


def interval(values: list[float]) -> float:
    """Half the width of the mean's 90 % interval, by Student's t."""
    freedom = len(values) - 1
    return (
        float(t.ppf(0.95, freedom)) * statistics.stdev(values) / len(values) ** 0.5 if freedom else math.inf
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of trivial trials")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the study; 0: without it")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="of a study, in seconds")
    given = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("Against Ray Tune: not measured, as it is not there. pip install 'ray[tune]==2.60.0'")
        return
    with tempfile.TemporaryDirectory(prefix="stretto-ray-") as place, running_ray(Path(place)) as ray:
        compare_trivial(Path(place), ray, given.rounds)
        if given.seeds:
            compare_studies(Path(place), ray, given.seeds, given.deadline)


if __name__ == "__main__":
    main()
