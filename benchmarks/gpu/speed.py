"""Whether the speed model predicts step times of batch sizes that were never tried: within 5 %.

    PYTHONPATH=src python3 benchmarks/gpu/speed.py                    (about 1 minute on an H200)

ResNet-18 on 32x32 images, one worker. The model is fitted to six batch sizes, those of a run that doubles its
batch. Sizes between them, and one above, are held out. Up to a batch of about 128 a step is bound by kernel
launches and takes equally long; larger sizes cannot tell how long that is.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict

import torch
from shared import DEVICE, device_name, now_s, resnet18, save, use_tensor_cores, verdict
from torch.nn.functional import cross_entropy

from stretto.core.observations import SpeedSample
from stretto.models.speed import fit_all_reduce

FITTED = (32, 64, 128, 256, 512, 1024)
HELD_OUT = (48, 96, 192, 320, 384, 448, 640, 768, 896, 1280)
MOST = 0.05
BLOCK_STEPS, BLOCKS = 20, 7


class Training:
    """Steps of one batch size on random data."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self._model = resnet18()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._images = torch.randn(batch, 3, 32, 32, device=DEVICE)
        self._labels = torch.randint(10, (batch,), device=DEVICE)

    def step_s(self) -> float:
        """Mean of a block of steps."""
        began_s = now_s()
        for _ in range(BLOCK_STEPS):
            self._optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(self._model(self._images), self._labels))
            self._optimizer.step()
        return (now_s() - began_s) / BLOCK_STEPS


def measure(batches: list[int]) -> dict[int, float]:
    """Median step times. The sizes take turns, so that other load affects all alike."""
    trainings = {batch: Training(batch) for batch in batches}
    blocks_s = [
        {batch: training.step_s() for batch, training in trainings.items()} for _ in range(BLOCKS + 1)
    ]
    return {batch: statistics.median(block[batch] for block in blocks_s[1:]) for batch in batches}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide batch sizes, to try this without a card"
    )
    options = parser.parse_args()
    use_tensor_cores()
    kinds = {"fitted": FITTED, "held out": HELD_OUT}
    kind_of = {batch // options.shrink: kind for kind, sizes in kinds.items() for batch in sizes}
    fitted, held_out = (
        [batch for batch, kind in kind_of.items() if kind == wanted] for wanted in ("fitted", "held out")
    )
    measured_s = measure(sorted(kind_of))
    speed = fit_all_reduce(SpeedSample(1, 1, 0, batch, measured_s[batch], 0.0) for batch in fitted)
    errors = {batch: float(speed.step_s(1, 1, batch)) / seconds - 1 for batch, seconds in measured_s.items()}
    print(f"Speed model of ResNet-18, {device_name()}, torch {torch.__version__}")
    print("  batch   step ms   model ms    error")
    for batch, seconds in measured_s.items():
        model_ms = 1e3 * float(speed.step_s(1, 1, batch))
        print(f"  {batch:5} {1e3 * seconds:9.2f} {model_ms:10.2f} {errors[batch]:+8.1%}  {kind_of[batch]}")
    mean = statistics.mean(abs(errors[batch]) for batch in held_out)
    worst = max(abs(errors[batch]) for batch in held_out)
    print(
        f"  held out: mean error {mean:.1%}, worst {worst:.1%}, at most {MOST:.0%}: {verdict(worst <= MOST)}"
    )
    save(
        "speed",
        {"device": device_name(), "step_s": measured_s, "errors": errors, "model": asdict(speed)},
    )


if __name__ == "__main__":
    main()
