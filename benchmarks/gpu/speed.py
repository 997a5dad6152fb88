"""Whether the speed model says how long steps of batch sizes take that were never tried: within 5 %.

    PYTHONPATH=src python3 benchmarks/gpu/speed.py                    (about 1 minute on an H200)

ResNet-18 on 32x32 images, one worker. Six batch sizes are fitted; those between and one beyond are held out.
Below about 128 a step takes as long as the processor needs to ask for it, whatever the batch: a constant and
a slope cannot say that, and those sizes are shown but not counted.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from shared import DEVICE, device_name, now_s, resnet18, save, verdict
from torch.nn.functional import cross_entropy

from stretto.core.observations import SpeedSample
from stretto.models.speed import fit_all_reduce

FITTED = (128, 256, 384, 512, 768, 1024)
HELD_OUT = (192, 320, 448, 640, 896, 1280)
TOO_SMALL = (32, 64)
MOST = 0.05
BLOCK_STEPS, BLOCKS = 20, 7


def step_s(batch: int) -> float:
    """Median over blocks of steps, after one that warms up."""
    torch.manual_seed(0)
    model = resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(batch, 3, 32, 32, device=DEVICE)
    labels = torch.randint(10, (batch,), device=DEVICE)
    blocks_s = []
    for _ in range(BLOCKS + 1):
        began_s = now_s()
        for _ in range(BLOCK_STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(images), labels))
            optimizer.step()
        blocks_s.append((now_s() - began_s) / BLOCK_STEPS)
    return statistics.median(blocks_s[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide batch sizes, to try this without a card"
    )
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    kinds = {"fitted": FITTED, "held out": HELD_OUT, "not counted": TOO_SMALL}
    kind_of = {batch // options.shrink: kind for kind, sizes in kinds.items() for batch in sizes}
    fitted, held_out = (
        [batch for batch, kind in kind_of.items() if kind == wanted] for wanted in ("fitted", "held out")
    )
    measured_s = {batch: step_s(batch) for batch in sorted(kind_of)}
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
        {"device": device_name(), "step_s": measured_s, "errors": errors, "model": speed.parameters()},
    )


if __name__ == "__main__":
    main()
