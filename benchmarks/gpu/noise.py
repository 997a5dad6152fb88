"""What measuring gradient noise costs a step of ResNet-18 on a card: at most 2 % from batch 128 up.

    PYTHONPATH=src python3 benchmarks/gpu/noise.py                    (about 3 minutes on an H200)

Blocks of steps with and without the estimator take turns; the median ratio of neighbouring blocks counts.
One worker, which makes a step now and then in two passes and compares them; with SGD, and with Adam's
preconditioning.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from shared import DEVICE, device_name, now_s, resnet18, save, verdict
from torch.nn.functional import cross_entropy

from stretto.torch.noise import SPLIT_PERIOD, NoiseEstimator

BATCHES = (32, 64, 128, 256, 512, 1024)
COUNTED_FROM, MOST = 128, 0.02
BLOCK_STEPS = SPLIT_PERIOD
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}


class Training:
    """Steps on random images, which take as long as on any other."""

    def __init__(self, batch: int, optimizer: str) -> None:
        torch.manual_seed(0)
        self.batch = batch
        self.model = resnet18()
        self.parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        self.estimator = NoiseEstimator(self.optimizer, batch)
        self.images = torch.randn(batch, 3, 32, 32, device=DEVICE)
        self.labels = torch.randint(10, (batch,), device=DEVICE)
        self.step = 0

    def block_s(self, *, measured: bool) -> float:
        began_s = now_s()
        for _ in range(BLOCK_STEPS):
            self.optimizer.zero_grad()
            if measured and self.estimator.splits(self.step):
                self._two_passes()
            else:
                torch.autograd.backward(cross_entropy(self.model(self.images), self.labels))
            self.optimizer.step()
            self.step += 1
        return now_s() - began_s

    def _two_passes(self) -> None:
        half = self.batch // 2
        for rows in (slice(0, half), slice(half, None)):
            torch.autograd.backward(cross_entropy(self.model(self.images[rows]), self.labels[rows]))
            if rows.stop == half:
                gradients = [one.grad for one in self.parameters if one.grad is not None]
                self.estimator.first_pass(gradients, self.parameters)
        torch._foreach_mul_(gradients, 0.5)
        self.estimator.total(self.parameters, step=self.step, batch=self.batch, part_batch=half)


def overhead(batch: int, optimizer: str, pairs: int) -> tuple[float, float]:
    """Seconds of a step without the estimator, and the share it adds."""
    training = Training(batch, optimizer)
    for measured in (False, True):
        training.block_s(measured=measured)
    plain_s, ratios = [], []
    for _ in range(pairs):
        without_s = training.block_s(measured=False)
        ratios.append(training.block_s(measured=True) / without_s)
        plain_s.append(without_s / BLOCK_STEPS)
    return statistics.median(plain_s), statistics.median(ratios) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="blocks with and without")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"Gradient noise on ResNet-18, {device_name()}, torch {torch.__version__}")
    print("  optimizer  batch   step ms   added")
    rows = []
    for optimizer in OPTIMIZERS:
        for batch in options.batches:
            step_s, share = overhead(batch, optimizer, options.pairs)
            rows.append({"optimizer": optimizer, "batch": batch, "step_s": step_s, "added": share})
            print(f"  {optimizer:9} {batch:6} {1e3 * step_s:9.2f} {share:+7.2%}", flush=True)
    worst = max((row["added"] for row in rows if row["batch"] >= COUNTED_FROM), default=0.0)
    print(f"  worst from batch {COUNTED_FROM} up {worst:+.2%}, at most {MOST:.0%}: {verdict(worst <= MOST)}")
    save("noise", {"device": device_name(), "rows": rows, "worst": worst})


if __name__ == "__main__":
    main()
