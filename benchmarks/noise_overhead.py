"""What measuring gradient noise costs a training step on a CPU: at most 5 %.

Blocks of steps with and without measuring take turns in one training. The median ratio of neighbouring blocks
counts; blocks with a step in two passes are counted separately. One worker is judged by its processor time,
so that other work on the machine matters less; two workers wait for each other, so the clock counts.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

import torch
from common import verdict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto.torch.run
from stretto.torch import Run
from stretto.torch.noise import EARLY_STEPS, SAMPLE_PERIOD
from stretto.torch.stepper import Stepper

MOST = 0.05
BLOCK_STEPS = SAMPLE_PERIOD
WARM_PAIRS, PAIRS = 6, 40
BLOCKS_OF_A_PASS = 8
"""The steps to be split are chosen at the beginning of a pass over the data."""
PASSES = 2
WORKERS = 2


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer]
    passes: int = 1


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


IMAGE, FLAT = (1, 28, 28), (784,)
CASES = [
    Case("CNN, SGD", small_cnn, IMAGE, 64, torch.optim.SGD),
    Case("CNN, Adam", small_cnn, IMAGE, 64, torch.optim.Adam),
    Case("CNN, SGD, 2 passes", small_cnn, IMAGE, 64, torch.optim.SGD, PASSES),
    Case("MLP, SGD", mlp, FLAT, 64, torch.optim.SGD),
    Case("MLP, Adam", mlp, FLAT, 64, torch.optim.Adam),
    Case("MLP, SGD, 2 passes", mlp, FLAT, 64, torch.optim.SGD, PASSES),
]


class EveryOtherBlock(Stepper):
    """Measures in the odd blocks of steps only, as often there as usual."""

    def wants(self) -> bool:
        return self._current.step // BLOCK_STEPS % 2 == 1 and super().wants()

    def splits(self, step: int) -> bool:
        block, place = divmod(step, BLOCK_STEPS)
        return block % 2 == 1 and super().splits(EARLY_STEPS + block // 2 * BLOCK_STEPS + place)


@dataclass(frozen=True)
class Block:
    """Runs some steps; returns whether one of them was split."""

    seconds: float
    split: bool


def blocks_of(case: Case, run: Run, pairs: int, clock: Callable[[], float]) -> Iterator[Block]:
    """Trains on random data, which takes as long as any other; odd blocks are measured."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model.parameters(), lr=1e-3)
    rows = TensorDataset(torch.zeros(BLOCKS_OF_A_PASS * BLOCK_STEPS * case.batch))
    model, optimizer, loader = run.prepare(
        model,
        optimizer,
        DataLoader(rows, batch_size=case.batch),
        adaptive=True,
        max_batch_size=case.batch,
        per_worker_batch=(1, case.batch // case.passes),
    )
    inputs, labels = torch.randn(case.batch, *case.input_shape), torch.randint(10, (case.batch,))
    turn = run._engine.current  # noqa: SLF001
    began_s, split = clock(), False
    for _ in run.epochs(ceil(2 * pairs / BLOCKS_OF_A_PASS)):
        for (part,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(inputs[: len(part)]), labels[: len(part)]))
            optimizer.step()
            split |= turn.layout != turn.base
            if turn.share.last and turn.step % BLOCK_STEPS == BLOCK_STEPS - 1:
                now_s = clock()
                yield Block(now_s - began_s, split)
                began_s, split = now_s, False
    run.finish()


def overhead(case: Case, clock: Callable[[], float] = time.process_time) -> tuple[float, float]:
    """Seconds of a step without measuring, and the share that measuring adds."""
    stretto.torch.run.Stepper = EveryOtherBlock  # type: ignore[attr-defined]
    blocks = list(blocks_of(case, Run(), WARM_PAIRS + PAIRS, clock))
    pairs = list(zip(blocks[::2], blocks[1::2], strict=False))[WARM_PAIRS:]
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for plain, measured in pairs:
        ratios[measured.split].append(measured.seconds / plain.seconds)
    mean = sum(statistics.median(kind) * len(kind) for kind in ratios.values() if kind) / len(pairs)
    return statistics.median(plain.seconds for plain, _ in pairs) / BLOCK_STEPS, mean - 1


def overhead_together(case: Case) -> tuple[float, float]:
    """The same with several workers, each a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, case.name]
    workers = [
        subprocess.Popen(  # noqa: S603
            command, env={**os.environ, **group, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORKERS)
    ]
    leader, *_ = [worker.communicate()[0] for worker in workers]
    step_s, share = leader.split()[-2:]
    return float(step_s), float(share)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(*overhead(next(case for case in CASES if case.name == sys.argv[1]), time.perf_counter))
        return
    print("Gradient noise: overhead of a step on processors")
    worst = 0.0
    runs: list[tuple[Case, Callable[[Case], tuple[float, float]], int]] = [
        (case, overhead, 1) for case in CASES
    ]
    runs += [(case, overhead_together, WORKERS) for case in CASES if case.passes == 1]
    for case, measure, workers in runs:
        step_s, share = measure(case)
        worst = max(worst, share)
        print(f"  {workers} x {case.name:18} {1e3 * step_s:7.2f} ms a step  {share:+7.1%}", flush=True)
    print(f"  worst {worst:+.1%}, at most {MOST:.0%}: {verdict(worst <= MOST)}")


if __name__ == "__main__":
    main()
