"""Figure: after any fault, Ctrl-C, SIGTERM and a deadline end a run in time.

Every kind of fault of benchmarks/faults.py strikes a run that trains. Right after it the run must stop,
three times in each of the three ways. The run and all its processes must end within 10 s, plus the grace of
its workers, plus the time of one checkpoint. It must end without a traceback.

Without --full each kind is tried once, in one of the three ways. A single late stop fails the figure.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common import TEST_HELPERS, verdict

sys.path += TEST_HELPERS
import fault_commands
from fault_commands import Commands
from fault_inject import Disturbed, Kind, step_clock
from fault_study import RULES, lay_out
from live_processes import eventually, pids_with
from stretto.substrate.elastic.effects import Rules

AnyKind = Kind | fault_commands.Kind
PATIENCE_S = 10.0
CHECKPOINT_S = 1.0
"""More than the time of a checkpoint of these small models."""
DEADLINES_S = {"study": 30.0, "tune": 12.0}
"""Studies import torch first."""
BEFORE_S = 1.5
"""Seconds between a fault and the deadline."""
TIMES = 3
AT_ONCE = 3
BEGINS_S, GIVEN_UP_S = 90.0, 120.0


class How(StrEnum):
    """Ways to end a run."""

    CTRL_C = "Ctrl-C"
    TERM = "SIGTERM"
    DEADLINE = "deadline"


ENDS = frozenset({"CONTROLLER", "JOURNAL", "JOURNAL_BYTES"})
"""Faults that end the controller: it is started again, then asked to stop."""
SIGNALS = {How.CTRL_C: signal.SIGINT, How.TERM: signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Case:
    kind: AnyKind
    how: How
    number: int

    @property
    def way(self) -> str:
        return "study" if isinstance(self.kind, Kind) else "tune"

    @property
    def bound_s(self) -> float:
        grace_s = RULES.grace_s if self.way == "study" else Rules().grace_s
        return PATIENCE_S + grace_s + CHECKPOINT_S


@dataclass(frozen=True, slots=True)
class Stopped:
    """The outcome of a case."""

    case: Case
    took_s: float
    """Seconds from the request to the end."""
    problem: str = ""


def cases(*, full: bool) -> list[Case]:
    kinds: list[AnyKind] = [*Kind, *fault_commands.Kind]
    if full:
        return [Case(kind, how, number) for kind in kinds for how in How for number in range(TIMES)]
    return [Case(kind, how, 0) for kind, how in zip(kinds, itertools.cycle(How), strict=False)]


def begun(case: Case, folder: Path, seed: int) -> Commands | Disturbed:
    """A run that would last much longer than the case."""
    deadline = f"{DEADLINES_S[case.way]:g}s" if case.how is How.DEADLINE else "1h"
    if case.way == "tune":
        return Commands(folder, "tune", seed, nap_s=8.0, deadline=deadline)
    lay_out(folder, trials=6, epochs=90, nap_s=0.1, epoch_s=1.0, deadline=deadline)
    return Disturbed(folder, "hypersched", seed)


def strike(run: Commands | Disturbed, kind: AnyKind, folder: Path, seed: int) -> None:
    """Injects the fault as soon as it can strike; restarts the process that it ended."""
    if kind.name == "CLOCK":  # with the controller alive: a deadline that is read anew is another one
        step_clock(folder, random.Random(seed))
        return
    struck = [False]

    def done() -> bool:
        match run, kind:
            case Commands(), fault_commands.Kind():
                struck[0] = run.strike(kind)
            case Disturbed(), Kind():
                struck[0] = run.strike(kind)
        return struck[0] or run.process.poll() is not None

    eventually(done, BEGINS_S)
    if kind.name in ENDS:
        eventually(lambda: run.process.poll() is not None, BEGINS_S)
        run.revive()


def stop(case: Case, place: Path, seed: int) -> Stopped:
    """Injects one fault, asks the run to stop, and waits until it is over."""
    folder = place / f"{case.way}-{case.kind.name}-{case.how.name}-{case.number}"
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    run = begun(case, folder, seed + case.number)
    try:
        eventually(lambda: run.trains() or run.process.poll() is not None, BEGINS_S)
        asked_s = began_s + DEADLINES_S[case.way]
        if case.how is How.DEADLINE:
            time.sleep(max(asked_s - BEFORE_S - time.monotonic(), 0.0))
        chance = random.Random(f"{seed} {case.number}")
        striking = threading.Thread(target=strike, args=(run, case.kind, folder, seed))
        striking.start()
        struck_whole = case.kind.name in {
            *ENDS,
            "TWO_STARTS",
        }  # a second start may go on with a run that was stopped
        striking.join(None if struck_whole else chance.uniform(0.0, 2.0))
        if case.how is not How.DEADLINE:
            time.sleep(chance.uniform(0.0, 2.0))
            asked_s = time.monotonic()
            run.process.send_signal(SIGNALS[case.how])
        striking.join()
        over = eventually(lambda: run.process.poll() is not None and not pids_with(str(folder)), GIVEN_UP_S)
        took_s = max(time.monotonic() - asked_s, 0.0)
        said = (folder / "command.log").read_text(errors="replace")
    finally:
        run.close()
    return Stopped(case, took_s, _problem(case, took_s, said, over=over))


def _problem(case: Case, took_s: float, said: str, *, over: bool) -> str:
    """A traceback of user code is shown on purpose; studies are driven by a script of the tests' own."""
    if not over or took_s > case.bound_s:
        return f"{took_s:.1f} s, {case.bound_s:g} s allowed: {said[-300:]}"
    excused = "a trap that was laid" in said or (case.way == "study" and "KeyboardInterrupt" in said)
    return f"a traceback: {said[-800:]}" if "Traceback" in said and not excused else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="three times in every way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds by name, such as GUARD")
    parser.add_argument("--keep", type=Path, help="leave all files in this folder")
    given = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # else ignored, here and below, if in the background
    began_s = time.monotonic()
    chosen = [case for case in cases(full=given.full) if given.only in {None, case.kind.name}]
    with tempfile.TemporaryDirectory(prefix="stretto-stopping-") as temporary:
        place = given.keep or Path(temporary)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            done = list(pool.map(lambda case: stop(case, place, given.seed), chosen))
    print(f"Stopping: {len(done)} runs in {time.monotonic() - began_s:.0f} s")
    print(f"  {'asked by':10} {'runs':>5} {'median s':>9} {'worst s':>8}")
    for how in How:
        times = [one.took_s for one in done if one.case.how is how]
        if times:
            print(f"  {how:10} {len(times):>5} {statistics.median(times):>9.2f} {max(times):>8.2f}")
    late = [one for one in done if one.problem]
    for one in late:
        print(f"  problem: {one.case.way}, {one.case.kind}, {one.case.how}: {one.problem}")
    print(f"  {len(late)} problems, 0 wanted: {verdict(not late)}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
