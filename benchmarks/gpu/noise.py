"""What measuring gradient noise costs a step of ResNet-18 on a card: at most 2 % from batch 128 up.

    PYTHONPATH=src python3 benchmarks/gpu/noise.py                    (about 4 minutes on an H200)

Two runs of the training library take turns, block by block: one with `adaptive=True`, whose batch may not
grow, and one without; one worker. Counted from where the cost of a sample is known; and, shown apart, over
the first steps of all, in which samples are taken whatever they cost.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from shared import as_it_is, device_name, now_s, random_images, resnet18, save, use_tensor_cores, verdict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from stretto.torch import Run

BATCHES = (64, 128, 256, 512, 1024)
COUNTED_FROM, MOST = 128, 0.02
EXAMPLES = 25_600
"""Of a pass over the data, at whose beginning the split steps to come are chosen."""
EARLY_STEPS, BLOCK_STEPS, WARM_STEPS = 100, 10, 20


class Training:
    """A loop that can be left after any number of steps and gone on with."""

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
                if self._run._engine.turn.share.last:  # noqa: SLF001 - a step may have two passes
                    yield

    def block(self) -> Block:
        """A few more steps."""
        began_s, split = now_s(), False
        for _ in range(BLOCK_STEPS):
            next(self._steps)
            split |= self._run._engine.turn.layout.passes > 1  # noqa: SLF001
        return Block((now_s() - began_s) / BLOCK_STEPS, split)


@dataclass(frozen=True)
class Block:
    """Some steps, and whether one of them was made in two passes."""

    step_s: float
    split: bool


@dataclass(frozen=True)
class Pair:
    """A block without measuring, and its neighbour with."""

    plain: Block
    measured: Block

    @property
    def added(self) -> float:
        return self.measured.step_s / self.plain.step_s - 1


def pairs_of(plain: Training, measured: Training, steps: int) -> list[Pair]:
    """Blocks that take turns, so that what else the machine does concerns both alike."""
    return [Pair(plain.block(), measured.block()) for _ in range(max(steps // BLOCK_STEPS, 1))]


def share_added(pairs: list[Pair]) -> float:
    """Median of blocks of plain steps, and of those with a split step as many as there were.

    Single blocks vary by several per cent, and a sum would be at the mercy of the slowest.
    """
    usual = [pair.added for pair in pairs if not pair.measured.split]
    split = [pair.added for pair in pairs if pair.measured.split]
    return sum(statistics.median(kind) * len(kind) for kind in (usual, split) if kind) / len(pairs)


def overhead(batch: int, optimizer: str, steps: int) -> tuple[float, float, float]:
    """Seconds of a step without measuring, and what measuring adds to it: the share, and that at first."""
    for adaptive in (False, True):  # the card's libraries load on first use
        one, other = (Training(batch, optimizer, adaptive=adaptive) for _ in range(2))
        pairs_of(one, other, WARM_STEPS)
    plain, measured = (Training(batch, optimizer, adaptive=adaptive) for adaptive in (False, True))
    early = pairs_of(plain, measured, EARLY_STEPS)
    pairs_of(plain, measured, EXAMPLES // batch - EARLY_STEPS)
    later = pairs_of(plain, measured, steps)
    step_s = statistics.median(pair.plain.step_s for pair in later)
    return step_s, share_added(later), share_added(early)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="with measuring, and without; of large batches fewer"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options = parser.parse_args()
    use_tensor_cores()
    print(f"Gradient noise on ResNet-18, {device_name()}, torch {torch.__version__}")
    print(f"  optimizer  batch   step ms   added   in the first {EARLY_STEPS} steps")
    rows = []
    for optimizer in ("SGD", "Adam"):
        for batch in options.batches:
            steps = min(options.steps, 256 * options.steps // batch)  # long ones vary less
            step_s, share, early = overhead(batch, optimizer, steps)
            rows.append(
                {"optimizer": optimizer, "batch": batch, "step_s": step_s, "added": share, "early": early}
            )
            print(f"  {optimizer:9} {batch:6} {1e3 * step_s:9.2f} {share:+7.2%} {early:+12.2%}", flush=True)
    worst = max((float(row["added"]) for row in rows if row["batch"] >= COUNTED_FROM), default=0.0)
    print(f"  worst from batch {COUNTED_FROM} up {worst:+.2%}, at most {MOST:.0%}: {verdict(worst <= MOST)}")
    save("noise", {"device": device_name(), "rows": rows, "worst": worst})


if __name__ == "__main__":
    main()
