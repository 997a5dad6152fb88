"""Figure: 200 random faults over running studies, after which everything is as if nothing had happened.

Studies train for real while workers, nurseries and controllers are killed, workers stopped, checkpoints
damaged, disks filled, exceptions raised and losses spoilt, in an order that the seed decides. In the end
every trial must be accounted for with the results of an undisturbed run, every example of an epoch seen once
by the steps that led there, the journal whole, and no process left.

A figure is missed if there is a single problem.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import verdict

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from fault_inject import Disturbed, Fault, Kind, Supply
from fault_judge import problems
from fault_seen import steps_of
from fault_study import lay_out

FAULTS = 200
SHARES = {
    Kind.WORKER: 60,
    Kind.STOP: 20,
    Kind.RAISE: 30,
    Kind.CHECKPOINT: 30,
    Kind.DISK: 20,
    Kind.NAN: 10,
    Kind.NURSERY: 12,
    Kind.CONTROLLER: 12,
    Kind.JOURNAL: 6,
}
"""Those that cost a nursery its imports, which take seconds, are fewer."""
POLICIES = ("hypersched", "rubberband", "hypersched", "asha")
TRIALS = 6
EPOCHS = 16
NAP_S = 0.05
"""Of a step: studies share the processor, and must last for some faults."""
AT_ONCE = 3
"""Studies at the same time: most of a fault's time is waiting."""
STUDY_S = 240.0
MOST_OF_A_STUDY = 20
"""Faults, so that it comes to its end in time."""


@dataclass(frozen=True)
class Outcome:
    """One study."""

    faults: tuple[tuple[Fault, float | None], ...]
    """With the seconds until it trained again; None if it had no need to."""
    problems: tuple[str, ...]


def kinds_in_order(count: int, seed: int) -> list[Kind]:
    """So many faults, each kind in its share, shuffled."""
    shares = list(SHARES.items())
    pool = [kind for kind, share in shares for _ in range(max(round(share * count / FAULTS), 1))]
    chance = random.Random(seed)
    pool += chance.choices(list(SHARES), list(SHARES.values()), k=max(count - len(pool), 0))
    chance.shuffle(pool)
    return pool[:count]


def disturb(folder: Path, policy: str, seed: int, supply: Supply) -> Disturbed:
    """One study from its start to its end."""
    folder.mkdir()
    lay_out(folder, trials=TRIALS, epochs=EPOCHS, nap_s=NAP_S, epoch_s=10 * NAP_S)
    study = Disturbed(folder, policy, seed)
    study.live(supply, STUDY_S, MOST_OF_A_STUDY)
    return study


def disturb_all(place: Path, count: int, seed: int) -> list[Disturbed]:
    """Studies, some at a time, until all faults have been."""
    supply = Supply(kinds_in_order(count, seed))
    numbers = itertools.count()

    def work() -> list[Disturbed]:
        studies = []
        while len(supply):
            number = next(numbers)
            policy = POLICIES[number % len(POLICIES)]
            studies.append(disturb(place / f"{number:03d}", policy, seed * 1000 + number, supply))
        return studies

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [one for done in [pool.submit(work) for _ in range(AT_ONCE)] for one in done.result()]


def judge(study: Disturbed) -> Outcome:
    """What came of a study's faults."""
    found = [*study.problems, *problems(study, trials=TRIALS, epochs=EPOCHS)]
    steps = steps_of(study.run)
    again = [(fault, fault.again(steps)) for fault in study.faults]
    return Outcome(
        tuple((fault, None if step is None else step.t_s - fault.t_s) for fault, step in again),
        tuple(f"{study.folder.name} {study.policy}: {one}" for one in found),
    )


def table(outcomes: list[Outcome]) -> None:
    """The last column is of those that had to train again; the others' trials were over."""
    print(f"  {'fault':36} {'number':>6} {'trained on':>10} {'was over':>8} {'median s':>9}")
    for kind in Kind:
        times = [time_s for one in outcomes for fault, time_s in one.faults if fault.kind is kind]
        again = [time_s for time_s in times if time_s is not None]
        middle = f"{statistics.median(again):9.2f}" if again else ""
        print(f"  {kind:36} {len(times):>6} {len(again):>10} {len(times) - len(again):>8} {middle}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="leave the studies' files in this folder")
    given = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stretto-faults-") as temporary:
        studies = disturb_all(given.keep or Path(temporary), given.faults, given.seed)
        outcomes = [judge(study) for study in studies]
    number = sum(len(one.faults) for one in outcomes)
    found = [problem for one in outcomes for problem in one.problems]
    print(f"Faults: {number} over {len(outcomes)} studies in {time.monotonic() - began_s:.0f} s")
    table(outcomes)
    for problem in found:
        print(f"  problem: {problem}")
    print(f"  {len(found)} problems, 0 wanted: {verdict(not found and number == given.faults)}")


if __name__ == "__main__":
    main()
