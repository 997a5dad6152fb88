"""Figure: 500 faults of 20 kinds over studies, jobs and commands, which must end as if undisturbed.

Studies train for real while we kill or stop workers, fork servers and controllers, damage checkpoints, their
meta.json and the journal, fill disks, use up file descriptors, step clocks, raise exceptions, spoil losses,
and try to start the same run twice. Commands, as jobs of `stretto run` and as trials of `stretto tune`, also
lose their guards, flood their output and lose their folder. The seed decides the order of faults.

At the end every trial and job must have the results of an undisturbed run. The steps that led there must have
used every example of an epoch once. The journal must be whole, no process may be left, and every refusal must
have an error message.

Without --full a tenth is tried, and nothing on Ray (benchmarks/ray_faults.py has a figure of its own). A
single problem fails the figure.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from common import TEST_HELPERS, verdict

sys.path += TEST_HELPERS
import fault_commands
from fault_commands import Commands, Way
from fault_inject import Disturbed, Kind, Supply
from fault_judge import problems
from fault_seen import steps_of
from fault_study import lay_out
from fault_verdict import problems_of

K = TypeVar("K")
T = TypeVar("T")

STUDIES = {
    Kind.WORKER: 60,
    Kind.STOP: 25,
    Kind.RAISE: 40,
    Kind.CHECKPOINT: 30,
    Kind.META: 20,
    Kind.DISK: 20,
    Kind.NAN: 15,
    Kind.NURSERY: 15,
    Kind.CONTROLLER: 15,
    Kind.JOURNAL: 15,
    Kind.JOURNAL_BYTES: 10,
    Kind.TWO_STARTS: 10,
    Kind.FLOOD: 10,
    Kind.EMFILE: 10,
    Kind.STOP_CONTROLLER: 5,
    Kind.STOP_NURSERY: 15,
    Kind.CLOCK: 5,
}
"""Fewer faults that cost a fork server its imports, which take seconds."""
_Command = fault_commands.Kind
COMMANDS = {
    _Command.WORKER: 8,
    _Command.STOP: 5,
    _Command.RAISE: 5,
    _Command.FLOOD: 6,
    _Command.GUARD: 12,
    _Command.STOP_GUARD: 8,
    _Command.CONTROLLER: 5,
    _Command.STOP_CONTROLLER: 6,
    _Command.JOURNAL_BYTES: 6,
    _Command.TWO_STARTS: 5,
    _Command.EMFILE: 6,
    _Command.CLOCK: 6,
    _Command.FOLDER: 8,
}
"""The numbers of faults for `run`; `tune` gets as many."""
RAY = 20
"""Kills and adds of nodes."""
FEWEST_KINDS, FEWEST = 15, 15
SHORT = 10
"""The short form divides the number of faults by this."""
POLICIES = ("hypersched", "rubberband", "hypersched", "asha")
TRIALS = 6
EPOCHS = 16
NAP_S = 0.05
"""The length of a step: studies share the processor, and must last for some faults."""
AT_ONCE = 3
"""Studies at the same time: most of a fault's time is waiting."""
STUDY_S = 300.0
RUN_S = 180.0
MOST_OF_A_STUDY, MOST_OF_A_RUN = 20, 5
"""The most faults of a study and of a run, so that it ends in time."""


@dataclass(frozen=True)
class Outcome:
    """One study or run."""

    faults: tuple[tuple[str, float | None], ...]
    """Names of kinds, with the seconds until training continued; None: it was not stopped, or not known."""
    problems: tuple[str, ...]


def in_order(shares: Mapping[K, int], share: int, seed: int) -> list[K]:
    """As many faults of each kind as it has, or one in `share`, shuffled."""
    kinds = [kind for kind, number in shares.items() for _ in range(max(round(number / share), 1))]
    random.Random(seed).shuffle(kinds)
    return kinds


def until_all_were(supply: Supply[K], disturb: Callable[[int], T]) -> list[T]:
    """One after the other, some at a time, until all faults have been."""
    numbers = itertools.count()

    def work() -> list[T]:
        done = []
        while len(supply):
            done.append(disturb(next(numbers)))
        return done

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [one for done in [pool.submit(work) for _ in range(AT_ONCE)] for one in done.result()]


def disturb_study(number: int, *, place: Path, seed: int, supply: Supply[Kind]) -> Disturbed:
    """One study from its start to its end."""
    folder = place / f"study-{number:03d}"
    folder.mkdir(parents=True)
    lay_out(folder, trials=TRIALS, epochs=EPOCHS, nap_s=NAP_S, epoch_s=10 * NAP_S)
    study = Disturbed(folder, POLICIES[number % len(POLICIES)], seed * 1000 + number)
    study.live(supply, STUDY_S, MOST_OF_A_STUDY)
    return study


def judge_study(study: Disturbed) -> Outcome:
    """The outcome of a study with faults."""
    found = [*study.problems, *problems(study, trials=TRIALS, epochs=EPOCHS)]
    steps = steps_of(study.run)
    again = [(fault, fault.again(steps)) for fault in study.faults]
    return Outcome(
        tuple((fault.kind.name, None if step is None else step.t_s - fault.t_s) for fault, step in again),
        tuple(f"{study.folder.name} {study.policy}: {one}" for one in found),
    )


def disturb_commands(number: int, *, place: Path, way: Way, seed: int, supply: Supply[_Command]) -> Outcome:
    """One run of commands from its start to its end."""
    folder = place / f"{way}-{number:03d}"
    folder.mkdir(parents=True)
    commands = Commands(folder, way, seed * 1000 + number)
    try:
        outcome = commands.live(supply, RUN_S, MOST_OF_A_RUN)
    finally:
        commands.close()
    found = tuple(f"{folder.name} {[one.name for one in outcome.faults]}: {p}" for p in problems_of(outcome))
    return Outcome(tuple((kind.name, None) for kind in outcome.faults), found)


def disturb_ray(seed: int) -> list[str]:
    """Problems of kills and adds of nodes of a Ray cluster."""
    script = Path(__file__).with_name("ray_faults.py")
    command = [sys.executable, str(script), "--faults", str(RAY), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own script
    print(done.stdout)
    return [f"Ray: {done.stdout[-500:]} {done.stderr[-500:]}"] if done.returncode else []


def table(outcomes: dict[str, list[Outcome]]) -> None:
    """Prints the faults; the last column has the median time of trials that had to train again."""
    names = list(dict.fromkeys([*(kind.name for kind in Kind), *(kind.name for kind in _Command)]))
    words = {kind.name: kind.value for kind in (*_Command, *Kind)}
    print(f"  {'fault':42} " + " ".join(f"{where:>8}" for where in outcomes) + f" {'median s':>9}")
    for name in names:
        counts = [sum(kind == name for one in part for kind, _ in one.faults) for part in outcomes.values()]
        times = [
            time_s
            for part in outcomes.values()
            for one in part
            for kind, time_s in one.faults
            if kind == name and time_s is not None
        ]
        middle = f"{statistics.median(times):9.2f}" if times else ""
        print(f"  {words[name]:42} " + " ".join(f"{count:>8}" for count in counts) + f" {middle}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all of them, and 20 on Ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("studies", "run", "tune"), help="leave the others out")
    parser.add_argument("--keep", type=Path, help="leave all files in this folder")
    given = parser.parse_args()
    share, began_s = (1 if given.full else SHORT), time.monotonic()
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-faults-") as temporary:
        place: Path = given.keep or Path(temporary)
        ways: tuple[Way, ...] = ("run", "tune")
        for way in ways:
            if given.only in {None, way}:
                to_come = Supply(in_order(COMMANDS, share, given.seed))
                disturb = partial(disturb_commands, place=place, way=way, seed=given.seed, supply=to_come)
                outcomes[way] = until_all_were(to_come, disturb)
        if given.only in {None, "studies"}:
            supply = Supply(in_order(STUDIES, share, given.seed))
            studies = until_all_were(
                supply, partial(disturb_study, place=place, seed=given.seed, supply=supply)
            )
            outcomes["studies"] = [judge_study(study) for study in studies]
        ray = RAY if given.full and given.only is None else 0
        on_ray = disturb_ray(given.seed) if ray else []
    return report(outcomes, on_ray, ray, time.monotonic() - began_s)


def report(outcomes: dict[str, list[Outcome]], on_ray: list[str], ray: int, took_s: float) -> int:
    """Prints the outcome; returns 1 if a figure is missed."""
    done = [one for part in outcomes.values() for one in part]
    kinds = Counter(kind for one in done for kind, _ in one.faults)
    print(f"Faults: {kinds.total() + ray} of {len(kinds)} kinds, {ray} of them on Ray, in {took_s:.0f} s")
    table(outcomes)
    found = [*on_ray, *(problem for one in done for problem in one.problems)]
    for problem in found:
        print(f"  problem: {problem[:1500]}")
    enough = not ray or (len(kinds) >= FEWEST_KINDS and min(kinds.values()) >= FEWEST)
    print(f"  {len(found)} problems, 0 wanted: {verdict(not found and enough)}")
    return int(bool(found) or not enough)


if __name__ == "__main__":
    sys.exit(main())
