"""What measuring gradient noise costs a step of ResNet-18 on a card: at most 2 % from batch 128 up.

    PYTHONPATH=src python3 benchmarks/gpu/noise.py                    (about 3 minutes on an H200)

Two runs of the training library take turns, block by block: one with `adaptive=True`, whose batch may not
grow, and one without. The median ratio of neighbouring blocks counts, one worker. The first steps, in which
noise is measured more often, are shown apart.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import torch
from shared import as_it_is, device_name, now_s, random_images, resnet18, save, verdict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from stretto.torch import Run
from stretto.torch.noise import EARLY_STEPS, SPLIT_PERIOD

BATCHES = (32, 64, 128, 256, 512, 1024)
COUNTED_FROM, MOST = 128, 0.02
BLOCK_STEPS = SPLIT_PERIOD
"""A block has one of everything that happens regularly."""


class Training:
    """A loop that can be left after any number of steps and gone on with."""

    def __init__(self, batch: int, optimizer: str, *, adaptive: bool, early: bool) -> None:
        torch.manual_seed(0)
        self._run = Run()
        self._adaptive = adaptive
        self._batch = batch
        self._model = resnet18()
        self._optimizer = (
            torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
            if optimizer == "SGD"
            else torch.optim.Adam(self._model.parameters(), lr=1e-4)
        )
        if not early:
            self._run._engine.turn.step = EARLY_STEPS  # noqa: SLF001 - as if so many had gone before
        self._steps = self._train()

    def _train(self) -> Iterator[None]:
        loader = DataLoader(random_images(64 * self._batch), batch_size=self._batch, collate_fn=as_it_is)
        model, optimizer, loader = self._run.prepare(
            self._model,
            self._optimizer,
            loader,
            adaptive=self._adaptive,
            max_batch_size=self._batch if self._adaptive else None,
        )
        for _ in self._run.epochs(10**6):
            for images, labels in loader:
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(model(images), labels))
                optimizer.step()
                if self._run._engine.turn.share.last:  # noqa: SLF001 - a step may have two passes
                    yield

    def block_s(self, steps: int = BLOCK_STEPS) -> float:
        began_s = now_s()
        for _ in range(steps):
            next(self._steps)
        return now_s() - began_s


def overhead(batch: int, optimizer: str, pairs: int, *, early: bool = False) -> tuple[float, float]:
    """Seconds of a step without measuring, and the share that measuring adds."""
    plain = Training(batch, optimizer, adaptive=False, early=early)
    measured = Training(batch, optimizer, adaptive=True, early=early)
    for training in (plain, measured):
        training.block_s()
    plain_s, ratios = [], []
    for _ in range(pairs):
        without_s = plain.block_s()
        ratios.append(measured.block_s() / without_s)
        plain_s.append(without_s / BLOCK_STEPS)
    return statistics.median(plain_s), statistics.median(ratios) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7, help="blocks with and without")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"Gradient noise on ResNet-18, {device_name()}, torch {torch.__version__}")
    print("  optimizer  batch   step ms   added   in the first steps")
    rows = []
    for optimizer in ("SGD", "Adam"):
        for batch in options.batches:
            step_s, share = overhead(batch, optimizer, options.pairs)
            _, early = overhead(batch, optimizer, 3, early=True)
            rows.append(
                {"optimizer": optimizer, "batch": batch, "step_s": step_s, "added": share, "early": early}
            )
            print(f"  {optimizer:9} {batch:6} {1e3 * step_s:9.2f} {share:+7.2%} {early:+12.2%}", flush=True)
    worst = max((float(row["added"]) for row in rows if row["batch"] >= COUNTED_FROM), default=0.0)
    print(f"  worst from batch {COUNTED_FROM} up {worst:+.2%}, at most {MOST:.0%}: {verdict(worst <= MOST)}")
    save("noise", {"device": device_name(), "rows": rows, "worst": worst})


if __name__ == "__main__":
    main()
