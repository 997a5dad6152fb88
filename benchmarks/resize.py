"""Figure: how long a running job stands still when it grows from one worker to two and shrinks again.

Three ways, in one run on one machine, each with models of 4, 40 and 400 MB:

    in place       newcomers start and warm up while the survivor trains; state from memory to memory
    forkserver     checkpoint to disk, stop; workers forked from a process that has torch in memory; load
    spawn          the same with fresh Python processes, as torchrun-style restarts do

A stall is the time between the last step before a resize and the first after it, less an ordinary step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import TEST_HELPERS, verdict

sys.path += TEST_HELPERS
from stretto.wire.messages import Left, Park
from torch_gang import Cradle, Gang, wait_until

ENTRY = f"{Path(__file__).with_name('resize_train.py')}:train"
SIZES_MB = (4, 40, 400)
STEPS = 4
"""Ordinary steps between two resizes, at least."""


@dataclass(frozen=True)
class Step:
    t_s: float
    workers: int


class Steps:
    """A job's steps, as its training code writes them to a file."""

    def __init__(self, times: Path) -> None:
        self._times = times

    def all(self) -> list[Step]:
        lines = self._times.read_text().splitlines() if self._times.exists() else []
        rows = [line.split() for line in lines if len(line.split()) == 3]
        return [Step(float(row[0]), int(row[1])) for row in rows]

    def train_on(self) -> int:
        """Some more steps of the present group; how many there are then."""
        before = len(self.all())
        wait_until(lambda: len(self.all()) >= before + STEPS, within_s=120)
        return len(self.all())

    def stall_s(self, before: int) -> float:
        """How long the change after the step `before` stopped training."""
        gaps = [later.t_s - one.t_s for one, later in itertools.pairwise(self.all())]
        change = max(range(before - 1, len(gaps)), key=gaps.__getitem__)
        usual = statistics.median(
            gaps[max(change - STEPS, 0) : change] + gaps[change + 1 : change + 1 + STEPS]
        )
        return max(gaps[change] - usual, 0.0)


def gang_and_steps(cradle: Cradle, folder: Path, mb: int) -> tuple[Gang, Steps]:
    times = folder / "times"
    config = {"mb": mb, "times": str(times)}
    return Gang(cradle, folder, config=config, checkpoint_every_s=1e9), Steps(times)


def in_place(cradle: Cradle, folder: Path, mb: int, rounds: int) -> list[float]:
    stalls = []
    gang, steps = gang_and_steps(cradle, folder, mb)
    with gang:
        gang.spawn("survivor")
        gang.form("survivor")
        for number in range(rounds):
            newcomer = f"newcomer {number}"
            gang.spawn(newcomer)
            before = steps.train_on()
            gang.form("survivor", newcomer)
            steps.train_on()
            stalls.append(steps.stall_s(before))
            before = steps.train_on()
            gang.form("survivor")
            gang.end(newcomer)
            steps.train_on()
            stalls.append(steps.stall_s(before))
    return stalls


def restart(cradle: Cradle, folder: Path, mb: int, rounds: int, *, fresh: bool) -> list[float]:
    stalls = []
    gang, steps = gang_and_steps(cradle, folder, mb)
    with gang:
        names = ["the first"]
        gang.spawn(names[0], fresh=fresh)
        gang.form(*names)
        for number, size in enumerate((2, 1) * rounds):
            before = steps.train_on()
            gang.tell(names[0], Park())
            gang.wait(names[0], Left)
            for name in names:
                gang.end(name)
            gang.trained.clear()
            names = [f"{number}.{rank}" for rank in range(size)]
            for name in names:
                gang.spawn(name, fresh=fresh)
            gang.form(*names)
            steps.train_on()
            stalls.append(steps.stall_s(before))
    return stalls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="resizes up and down of each kind and size")
    rounds = parser.parse_args().rounds
    print("Resize 1 -> 2 -> 1: median stall of those who train")
    print(f"{'model':>8} {'in place':>10} {'forkserver':>11} {'spawn':>9} {'/forkserver':>12} {'/spawn':>8}")
    reached = True
    for mb in SIZES_MB:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as name, Cradle(ENTRY, Path(name)) as cradle:
            folder = Path(name)
            ours = statistics.median(in_place(cradle, folder / "a", mb, rounds))
            forked = statistics.median(restart(cradle, folder / "b", mb, rounds, fresh=False))
            spawned = statistics.median(restart(cradle, folder / "c", mb, max(rounds // 3, 1), fresh=True))
        print(
            f"{mb:>5} MB {ours * 1e3:>7.0f} ms {forked * 1e3:>8.0f} ms {spawned * 1e3:>6.0f} ms "
            f"{ours / forked:>12.2f} {ours / spawned:>8.3f}   ({time.monotonic() - began_s:.0f} s)"
        )
        reached &= ours <= 0.5 * forked and ours <= 0.1 * spawned
    print(f"at most 0.50 of the forkserver's and 0.10 of spawn's: {verdict(reached)}")
    print("(that losses are those of an undisturbed run: tests/test_torch_elastic.py)")


if __name__ == "__main__":
    main()
