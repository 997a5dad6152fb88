"""Figure: what the training library costs a loop, compared with bare PyTorch and with an earlier version.

One worker trains a mid-size model (some 20 ms a step) and a tiny one (some 0.3 ms), each with a DataLoader.
Three loops take turns, each in its own process, for an epoch at a time: bare PyTorch, this library, and
the library of another commit (--base), from a git worktree. We measure the processor time of short blocks of
steps. Of each loop the fastest fifth counts, as other work on the machine only slows blocks.

Two workers under the library also show what comparing their fingerprints costs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common import ROOT, verdict

BASE = "b704a3c"
MOST_MID = 1.01
MORE_TINY = 0.01
MOST_COMPARING = 0.001
_FIRST = 6
"""Comparisons when a group forms and in its first steps."""
_COMPARISONS = _FIRST + 3


@dataclass(frozen=True)
class Case:
    name: str
    features: int
    width: int
    layers: int
    batch: int
    steps: int
    """Steps of one turn, which is an epoch."""
    block: int
    """Steps that are timed together."""


CASES = (
    Case("mid", features=512, width=1024, layers=4, batch=128, steps=10, block=2),
    Case("tiny", features=20, width=32, layers=2, batch=48, steps=300, block=10),
)


class Trainer:
    """A process that trains some epochs whenever it is asked to."""

    def __init__(self, case: Case, kind: str, source: Path | None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if source is not None:
            env["PYTHONPATH"] = str(source)
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, __file__, "--train", case.name, kind],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def turn_s(self) -> list[float]:
        """Processor seconds of the blocks of one turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("took "):
                return [float(text) for text in line.split()[1:]]
        raise RuntimeError("a trainer has ended")


def train(case: Case, kind: str) -> None:
    """The code of such a process: it trains an epoch whenever it reads a line."""
    import torch  # noqa: PLC0415 - the benchmark itself does without
    from torch import nn  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = [case.features, *[case.width] * (case.layers - 1)]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model: Any = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    examples = case.batch * case.steps
    data = TensorDataset(torch.randn(examples, case.features), torch.randint(2, (examples,)))
    loader: Any = DataLoader(data, batch_size=case.batch, shuffle=True)

    def epoch() -> list[float]:
        at_s = []
        for number, (x, y) in enumerate(loader):
            if number % case.block == 0:
                at_s.append(time.process_time())
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return [later - one for one, later in itertools.pairwise(at_s)]

    if kind == "bare":
        for _ in sys.stdin:
            print("took", *epoch(), flush=True)
        return
    from stretto.torch import Run  # noqa: PLC0415

    run = Run()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    epochs = run.epochs(1 << 30)
    if kind == "compared":
        compared = _Compared(run)
        while compared.count < _COMPARISONS:
            next(epochs)
            epoch()
        print("took", compared.share, flush=True)
        os._exit(0)
    for _ in sys.stdin:
        next(epochs)
        print("took", *epoch(), flush=True)


class _Compared:
    """Times the comparisons of a run's fingerprints, once they are no longer those of a new group."""

    def __init__(self, run: Any) -> None:
        watch = run._engine._watch  # noqa: SLF001
        compare = watch._compare  # noqa: SLF001
        self.count = 0
        self._spent_s: list[float] = []
        self._ended_s: list[float] = []

        def timed() -> None:
            began_s = time.perf_counter()
            compare()
            self.count += 1
            self._ended_s.append(time.perf_counter())
            self._spent_s.append(self._ended_s[-1] - began_s)

        watch._compare = timed  # noqa: SLF001

    @property
    def share(self) -> float:
        """Seconds of a comparison / (steps between two x seconds of a step), on average."""
        spent_s = self._spent_s[_FIRST:]
        between_s = self._ended_s[-1] - self._ended_s[_FIRST - 1] - sum(spent_s)
        return sum(spent_s) / between_s


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The sources of another commit."""
    with tempfile.TemporaryDirectory() as name:
        git = ["git", "-C", str(ROOT), "worktree"]
        tree = Path(name) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)  # noqa: S603
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)  # noqa: S603


def ratios(case: Case, base: Path, rounds: int) -> tuple[float, float, float]:
    """Time relative to the bare loop, for the current and the earlier library; and seconds of a bare step."""
    with ExitStack() as stack:
        bare, ours, before = (
            stack.enter_context(Trainer(case, kind, source))
            for kind, source in (("bare", None), ("stretto", ROOT / "src"), ("stretto", base))
        )
        for trainer in (bare, ours, before):
            trainer.turn_s()
        took_s: dict[Trainer, list[float]] = {trainer: [] for trainer in (bare, ours, before)}
        for number in range(rounds):
            order = [bare, ours, before]
            for trainer in order[number % 3 :] + order[: number % 3]:
                took_s[trainer] += trainer.turn_s()
    now, then, plain = (_fastest(took_s[trainer]) for trainer in (ours, before, bare))
    return now / plain, then / plain, plain / case.block


def _fastest(times_s: list[float]) -> float:
    """The mean of the fastest fifth."""
    return statistics.mean(sorted(times_s)[: max(len(times_s) // 5, 1)])


def comparing(case: Case) -> float:
    """The share of the time that two workers spend on comparing fingerprints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    workers = [
        subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, __file__, "--train", case.name, "compared"],
            env={**env, "MASTER_PORT": str(port), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    leader, _ = [worker.communicate()[0] for worker in workers]
    return float(leader.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default=BASE, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--train", nargs=2, metavar=("CASE", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if options.train:
        train(by_name[options.train[0]], options.train[1])
        return
    print(f"Overhead of the training library, one worker; before: {options.base}")
    print(f"{'loop':<6} {'bare step':>10} {'now':>8} {'before':>8} {'at most':>8}")
    reached = True
    with checkout(options.base) as base:
        for case in CASES:
            now, before, step_s = ratios(case, base, options.rounds)
            most = MOST_MID if case.name == "mid" else before + MORE_TINY
            reached &= now <= most
            print(
                f"{case.name:<6} {step_s * 1e3:>7.2f} ms {now:>8.3f} {before:>8.3f} {most:>8.3f}", flush=True
            )
    shares = {case.name: comparing(case) for case in CASES}
    reached &= max(shares.values()) <= MOST_COMPARING
    shown = ", ".join(f"{name} {share:.5f}" for name, share in shares.items())
    print(f"comparing fingerprints, two workers, share of the time: {shown} (at most {MOST_COMPARING:g})")
    print(f"within all of these: {verdict(reached)}")


if __name__ == "__main__":
    main()
