"""What measuring gradient noise costs a step of ResNet-18 on a GPU: at most 2 % from batch 128 up.

    PYTHONPATH=src python3 benchmarks/gpu/noise.py                    (about 7 minutes on an H200)

Two runs of the training library with one worker take turns, block by block: one with `adaptive=True`, whose
batch may not grow, and one without. Steps count once the cost of a sample is known. The first steps are shown
separately, as samples are then taken whatever they cost.

We compare the total time of steps with measuring and without, including any load by other programs; the
standard error shows how large that effect may be. The median of blocks is printed beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from shared import as_it_is, device_name, now_s, random_images, resnet18, save, use_tensor_cores, verdict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from stretto.torch import Run

BATCHES = (64, 128, 256, 512, 1024)
OPTIMIZERS = ("SGD", "Adam")
COUNTED_FROM, MOST = 128, 0.02
EXAMPLES = 25_600
"""Examples of a pass over the data; the steps to be split are chosen at its beginning."""
EARLY_STEPS, BLOCK_STEPS, WARM_STEPS = 100, 10, 20
VARIES_UP_TO = 256
"""For larger batches a few steps suffice: there the GPU sets the pace, and it is steady."""


class Training:
    """A training loop that can be paused after any number of steps."""

    def __init__(self, batch: int, optimizer: str, *, adaptive: bool) -> None:
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
        self._steps = self._train()

    def _train(self) -> Iterator[None]:
        loader = DataLoader(random_images(EXAMPLES), batch_size=self._batch, collate_fn=as_it_is)
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
                if self._run._engine.current.share.last:  # noqa: SLF001 - a step may have two passes
                    yield

    def block(self) -> Block:
        """Runs a few more steps."""
        began_s, split = now_s(), False
        for _ in range(BLOCK_STEPS):
            next(self._steps)
            split |= self._run._engine.current.layout.passes > 1  # noqa: SLF001
        return Block((now_s() - began_s) / BLOCK_STEPS, split)


@dataclass(frozen=True)
class Block:
    """Runs some steps; returns whether one of them was made in two passes."""

    step_s: float
    split: bool


@dataclass(frozen=True)
class Pair:
    """A block without measuring, and the next one with measuring."""

    plain: Block
    measured: Block

    @property
    def added(self) -> float:
        return self.measured.step_s / self.plain.step_s - 1


def pairs_of(plain: Training, measured: Training, steps: int) -> list[Pair]:
    """Alternating blocks, each kind first every other time, so that other load affects both alike."""
    pairs = []
    for number in range(max(steps // BLOCK_STEPS, 1)):
        order = (plain, measured) if number % 2 == 0 else (measured, plain)
        blocks = {training: training.block() for training in order}
        pairs.append(Pair(blocks[plain], blocks[measured]))
    return pairs


@dataclass(frozen=True)
class Added:
    """The share that measuring adds to the time of steps."""

    mean: float
    """The ratio of the summed times."""
    error: float
    """Standard error of the mean."""
    median: float


def share_added(pairs: list[Pair]) -> Added:
    """The ratio of sums r = sum m / sum p, less 1; its error from what the pairs leave over, m - r p."""
    ratio = sum(pair.measured.step_s for pair in pairs) / sum(pair.plain.step_s for pair in pairs)
    squares = sum((pair.measured.step_s - ratio * pair.plain.step_s) ** 2 for pair in pairs)
    deviation_s = math.sqrt(squares / max(len(pairs) - 1, 1))
    plain_s = statistics.mean(pair.plain.step_s for pair in pairs)
    return Added(ratio - 1, deviation_s / plain_s / math.sqrt(len(pairs)), median_added(pairs))


def median_added(pairs: list[Pair]) -> float:
    """Of blocks of plain steps, and of those with a split step as many as there were."""
    usual = [pair.added for pair in pairs if not pair.measured.split]
    split = [pair.added for pair in pairs if pair.measured.split]
    return sum(statistics.median(kind) * len(kind) for kind in (usual, split) if kind) / len(pairs)


@dataclass(frozen=True)
class Row:
    """One optimizer at one batch size."""

    optimizer: str
    batch: int
    steps: int
    step_s: float
    """Step time without measuring."""
    splits: float
    """The share of blocks with a step in two passes."""
    later: Added
    early: Added

    def __str__(self) -> str:
        return (
            f"  {self.optimizer:9} {self.batch:6} {self.steps:6} {1e3 * self.step_s:9.2f} "
            f"{self.later.mean:+8.2%} +-{self.later.error:6.2%} {self.later.median:+8.2%} "
            f"{self.early.mean:+10.2%} +-{self.early.error:6.2%}"
        )


HEADER = (
    f"  optimizer  batch  steps   step ms    added    s.e.   median    first {EARLY_STEPS}    s.e.\n"
    "  (added: all the time with measuring against all without; median: of blocks)"
)


def measure(batch: int, optimizer: str, steps: int) -> Row:
    for adaptive in (False, True):  # the card's libraries load on first use
        one, other = (Training(batch, optimizer, adaptive=adaptive) for _ in range(2))
        pairs_of(one, other, WARM_STEPS)
    plain, measured = (Training(batch, optimizer, adaptive=adaptive) for adaptive in (False, True))
    early = pairs_of(plain, measured, EARLY_STEPS)
    pairs_of(plain, measured, EXAMPLES // batch - EARLY_STEPS)
    later = pairs_of(plain, measured, steps)
    return Row(
        optimizer=optimizer,
        batch=batch,
        steps=len(later) * BLOCK_STEPS,
        step_s=statistics.mean(pair.plain.step_s for pair in later),
        splits=statistics.mean(pair.measured.split for pair in later),
        later=share_added(later),
        early=share_added(early),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=2000, help="with measuring, and without; of large batches fewer"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    options = parser.parse_args()
    use_tensor_cores()
    print(f"Gradient noise on ResNet-18, {device_name()}, torch {torch.__version__}")
    print(HEADER, flush=True)
    rows = []
    for optimizer in options.optimizers:
        for batch in options.batches:
            varies = batch <= VARIES_UP_TO
            steps = options.steps if varies else VARIES_UP_TO * options.steps // (2 * batch)
            rows.append(measure(batch, optimizer, steps))
            print(rows[-1], flush=True)
            save("noise", {"device": device_name(), "rows": [asdict(row) for row in rows]})
    counted = [row.later for row in rows if row.batch >= COUNTED_FROM]
    if counted:
        worst = max(counted, key=lambda added: added.mean)
        print(f"  worst from batch {COUNTED_FROM} up {worst.mean:+.2%} +-{worst.error:.2%}, ", end="")
        print(f"at most {MOST:.0%}: {verdict(worst.mean <= MOST)}")


if __name__ == "__main__":
    main()
