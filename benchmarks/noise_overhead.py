"""What measuring gradient noise costs a training step on a processor: at most 5 %.

Blocks of steps with and without the estimator take turns, and the median ratio of
neighbouring blocks counts. One worker is judged by its processor time, so that other work on the machine does
not matter; two, which wait for each other, by the clock.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import verdict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run, stepper
from stretto.torch.noise import SAMPLE_PERIOD, NoiseEstimator

MOST = 0.05
BLOCK_STEPS = SAMPLE_PERIOD
"""One pair of sampled steps in each block."""
PAIRS_OF_BLOCKS = 25
PASSES = 2
WORKERS = 2
PAIRS_OF_TWO_WORKERS = 30


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


class Training:
    """Steps on random data, which take as long as on any other."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = case.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = case.optimizer(self.parameters, lr=1e-3)
        self.inputs = torch.randn(case.batch // case.passes, *case.input_shape)
        self.labels = torch.randint(10, (case.batch // case.passes,))
        self.estimator = NoiseEstimator(self.optimizer, case.batch)
        self.step = 0

    def block_s(self, *, measured: bool) -> float:
        began_s = time.process_time()
        for _ in range(BLOCK_STEPS):
            self._take_step(watched=measured and self.estimator.wants(self.step))
            self.step += 1
        return time.process_time() - began_s

    def _take_step(self, *, watched: bool) -> None:
        passes, batch = self.case.passes, self.case.batch
        self.optimizer.zero_grad()
        for one_pass in range(passes):
            torch.autograd.backward(cross_entropy(self.model(self.inputs), self.labels))
            if watched and passes > 1 and one_pass == 0:
                gradients = [one.grad for one in self.parameters if one.grad is not None]
                self.estimator.first_pass(gradients, self.parameters)
        if watched:
            part_batch = batch // passes if passes > 1 else None
            self.estimator.total(self.parameters, step=self.step, batch=batch, part_batch=part_batch)
        self.optimizer.step()


def overhead(case: Case) -> tuple[float, float]:
    """Seconds of a step without the estimator, and the share it adds."""
    training = Training(case)
    for measured in (False, True):
        training.block_s(measured=measured)
    plain_s, ratios = [], []
    for _ in range(PAIRS_OF_BLOCKS):
        without_s = training.block_s(measured=False)
        ratios.append(training.block_s(measured=True) / without_s)
        plain_s.append(without_s / BLOCK_STEPS)
    return statistics.median(plain_s), statistics.median(ratios) - 1


class EveryOtherBlock(NoiseEstimator):
    """Samples in the odd blocks of steps only."""

    @staticmethod
    def wants(step: int) -> bool:
        return step // BLOCK_STEPS % 2 == 1 and NoiseEstimator.wants(step)


def train_together(case: Case) -> None:
    """One of several workers, through the library; rank 0 prints seconds of a step and the share added."""
    stepper.NoiseEstimator = EveryOtherBlock  # type: ignore[attr-defined]
    torch.manual_seed(0)
    run = Run()
    model = case.model()
    optimizer = case.optimizer(model.parameters(), lr=1e-3)
    steps = 2 * (PAIRS_OF_TWO_WORKERS + 1) * BLOCK_STEPS
    rows = TensorDataset(torch.zeros(steps * case.batch))
    loader = DataLoader(rows, batch_size=case.batch)
    model, optimizer, loader = run.prepare(model, optimizer, loader, adaptive=True, max_batch_size=case.batch)
    inputs = torch.randn(case.batch // WORKERS, *case.input_shape)
    labels = torch.randint(10, (case.batch // WORKERS,))
    ends_s: list[float] = []
    for _ in run.epochs(1):
        for step, _ in enumerate(loader, start=1):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(inputs), labels))
            optimizer.step()
            if step % BLOCK_STEPS == 0:
                ends_s.append(time.perf_counter())
    if run.is_main:
        blocks_s = [later - earlier for earlier, later in itertools.pairwise(ends_s)]
        pairs_s = list(zip(blocks_s[::2], blocks_s[1::2], strict=False))
        share = statistics.median(measured_s / plain_s for plain_s, measured_s in pairs_s) - 1
        print(statistics.median(plain_s for plain_s, _ in pairs_s) / BLOCK_STEPS, share)
    run.finish()


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
        train_together(next(case for case in CASES if case.name == sys.argv[1]))
        return
    print("Gradient noise: overhead of a step on processors")
    worst = 0.0
    runs = [(case, overhead, 1) for case in CASES]
    runs += [(case, overhead_together, WORKERS) for case in CASES if case.passes == 1]
    for case, measure, workers in runs:
        step_s, share = measure(case)
        worst = max(worst, share)
        print(f"  {workers} x {case.name:18} {1e3 * step_s:7.2f} ms a step  {share:+7.1%}", flush=True)
    print(f"  worst {worst:+.1%}, at most {MOST:.0%}: {verdict(worst <= MOST)}")


if __name__ == "__main__":
    main()
