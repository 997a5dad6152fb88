"""An adaptive batch against fixed ones, on Fashion-MNIST (about 4 minutes on an H200).

    PYTHONPATH=src python3 benchmarks/gpu/adaptive.py FOLDER_OF_IDX_GZ_FILES

Everybody trains for the same statistical work (steps at the initial batch), at learning rates scaled by the
same rule, and along the same schedule of that work. The target is the mean final accuracy of the fixed
initial batch less 0.3 points, which is also what final accuracies may differ by. Time counts training only.
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from shared import DEVICE, device_name, now_s, save, small_cnn, verdict
from torch import Tensor
from torch.nn.functional import cross_entropy

from stretto.core.allocation import BatchChoice
from stretto.core.job import BatchLimits
from stretto.core.observations import SpeedSample
from stretto.torch.adaptive import BatchTuner
from stretto.torch.noise import NoiseEstimator
from stretto.torch.rules import lr_factor, progress_of_step

INITIAL_BATCH, MAX_BATCH = 64, 1024
FIXED = (64, 128, 256, 512, 1024)
LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 5e-4
EPOCHS = 6.0
EVALUATIONS = 60
TIMED_STEPS = 20
"""The clock is read after so many steps, which costs everybody the same."""
TOLERANCE = 0.003
SOONER, NEAR_BEST = 1.5, 1.1
LIMITS = BatchLimits(
    initial=INITIAL_BATCH,
    requested=INITIAL_BATCH,
    max=MAX_BATCH,
    per_gpu_min=1,
    per_gpu_max=MAX_BATCH,
    accumulation=False,
)


@dataclass(frozen=True)
class Data:
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class Course:
    """Accuracy on the test images over the time trained, and the batch sizes used."""

    times_s: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    @property
    def final(self) -> float:
        return statistics.mean(self.accuracies[-3:])

    def reached_s(self, accuracy: float) -> float:
        return next(
            (
                time_s
                for time_s, value in zip(self.times_s, self.accuracies, strict=True)
                if value >= accuracy
            ),
            math.inf,
        )


def read_idx(path: Path) -> np.ndarray:
    """Bytes of an IDX file: a magic number, whose last byte counts the dimensions, the sizes, the values."""
    with gzip.open(path) as file:
        raw = file.read()
    sizes = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes)


def load(folder: Path, examples: int | None) -> Data:
    def images(name: str) -> Tensor:
        pixels = torch.tensor(read_idx(folder / f"{name}-images-idx3-ubyte.gz"), device=DEVICE)
        return (pixels[:, None].float() / 255 - 0.286) / 0.353

    def labels(name: str) -> Tensor:
        return torch.tensor(read_idx(folder / f"{name}-labels-idx1-ubyte.gz"), device=DEVICE).long()

    tests = None if examples is None else examples // 6
    return Data(
        images("train")[:examples], labels("train")[:examples], images("t10k")[:tests], labels("t10k")[:tests]
    )


class Training:
    """One run; with a tuner its batch size is its own affair."""

    def __init__(
        self, data: Data, batch: int, seed: int, *, adaptive: bool, pretend: list[float] | None
    ) -> None:
        torch.manual_seed(seed)
        self.data, self.batch, self.pretend = data, batch, pretend
        self.model = small_cnn()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.estimator = NoiseEstimator(self.optimizer, INITIAL_BATCH)
        self.tuner = BatchTuner(LIMITS) if adaptive else None
        self.step, self.units, self.time_s = 0, 0.0, 0.0
        self.order = torch.empty(0, dtype=torch.long, device=DEVICE)

    def run(self, epochs: float) -> Course:
        course = Course()
        work = epochs * len(self.data.labels) / INITIAL_BATCH
        while self.units < work:
            began_s, first_step = now_s(), self.step
            for _ in range(TIMED_STEPS):
                self._take_step(work)
            step_s = (now_s() - began_s) / (self.step - first_step)
            if self.pretend is not None:
                step_s = self.pretend[0] + self.pretend[1] * self.batch
            self.time_s += step_s * TIMED_STEPS
            self._tune(step_s)
            if self.units >= work * len(course.times_s) / EVALUATIONS:
                course.times_s.append(self.time_s)
                course.accuracies.append(self._accuracy())
                course.batches.append(self.batch)
        return course

    def _take_step(self, work: float) -> None:
        scale = self.batch / INITIAL_BATCH
        noise = self.estimator.sample()
        schedule = 0.5 * (1 + math.cos(math.pi * min(self.units / work, 1.0)))
        for group in self.optimizer.param_groups:
            group["lr"] = LR * schedule * lr_factor("auto", self.optimizer, noise, scale)
        self.optimizer.zero_grad()
        if self.estimator.splits(self.step):
            self._two_passes(self._next_rows())
        else:
            self._pass(self._next_rows())
        self.optimizer.step()
        self.units += progress_of_step(noise, scale)
        self.step += 1

    def _pass(self, rows: Tensor) -> None:
        torch.autograd.backward(cross_entropy(self.model(self.data.images[rows]), self.data.labels[rows]))

    def _two_passes(self, rows: Tensor) -> None:
        half = self.batch // 2
        self._pass(rows[:half])
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        self.estimator.first_pass(gradients, self.parameters)
        self._pass(rows[half:])
        torch._foreach_mul_(gradients, 0.5)
        self.estimator.total(self.parameters, step=self.step, batch=self.batch, part_batch=half)

    def _next_rows(self) -> Tensor:
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.data.labels), device=DEVICE)
        rows, self.order = self.order[: self.batch], self.order[self.batch :]
        return rows

    def _tune(self, step_s: float) -> None:
        if self.tuner is None:
            return
        self.tuner.saw([SpeedSample(1, 1, 0, self.batch, step_s, 0.0)])
        change = self.tuner.propose(
            self.estimator.sample(), nodes=1, workers=1, current=BatchChoice(self.batch), step=self.step
        )
        if change is not None:
            self.batch = change.batch.atomic // 2 * 2

    @torch.no_grad()
    def _accuracy(self) -> float:
        right = self.model(self.data.test_images).argmax(dim=1) == self.data.test_labels
        return float(right.float().mean())


def judge(fixed: dict[int, list[Course]], adaptive: list[Course]) -> dict[str, float]:
    """The figures: medians over seeds of the time to the target, and mean final accuracies."""
    target = statistics.mean(course.final for course in fixed[INITIAL_BATCH]) - TOLERANCE
    to_target_s = {
        batch: statistics.median(course.reached_s(target) for course in courses)
        for batch, courses in fixed.items()
    }
    own_s = statistics.median(course.reached_s(target) for course in adaptive)
    print(f"  target accuracy {target:.4f}; medians over {len(adaptive)} seeds")
    for batch, time_s in to_target_s.items():
        final = statistics.mean(course.final for course in fixed[batch])
        print(f"  fixed {batch:5}    {time_s:7.2f} s to the target   final {final:.4f}")
    final = statistics.mean(course.final for course in adaptive)
    print(f"  adaptive       {own_s:7.2f} s to the target   final {final:.4f}")
    return {
        "target": target,
        "sooner": to_target_s[INITIAL_BATCH] / own_s,
        "against_best": own_s / min(to_target_s.values()),
        "final_difference": final - (target + TOLERANCE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--examples", type=int, help="only the first so many, and a sixth of that to test")
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--fixed", type=int, nargs="+", default=list(FIXED))
    parser.add_argument(
        "--pretend",
        type=float,
        nargs=2,
        metavar=("CONSTANT_S", "EXAMPLE_S"),
        help="step times by a formula instead of the clock, to try this without a card",
    )
    options = parser.parse_args()
    data = load(options.folder, options.examples)
    print(f"Adaptive batch on Fashion-MNIST, {device_name()}, torch {torch.__version__}", flush=True)

    def train(batch: int, seed: int, *, adaptive: bool, epochs: float) -> Course:
        run = Training(data, batch, seed, adaptive=adaptive, pretend=options.pretend)
        return run.run(epochs)

    for batch in options.fixed:  # the card's libraries load on first use
        train(batch, 0, adaptive=False, epochs=0.02)
    fixed: dict[int, list[Course]] = {batch: [] for batch in options.fixed}
    adaptive: list[Course] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for batch, courses in fixed.items():
            courses.append(train(batch, seed, adaptive=False, epochs=options.epochs))
        adaptive.append(train(INITIAL_BATCH, seed, adaptive=True, epochs=options.epochs))
        newest = adaptive[-1]
        print(f"  seed {seed}: adaptive {newest.final:.4f} in {newest.times_s[-1]:.1f} s, batches ", end="")
        print(" ".join(str(batch) for batch in dict.fromkeys(newest.batches)), flush=True)
    figures = judge(fixed, adaptive)
    print(f"  {figures['sooner']:.2f}x sooner than fixed {INITIAL_BATCH}, at least {SOONER}: ", end="")
    print(verdict(figures["sooner"] >= SOONER))
    print(f"  {figures['against_best']:.2f} of the best fixed batch's time, at most {NEAR_BEST}: ", end="")
    print(verdict(figures["against_best"] <= NEAR_BEST))
    print(f"  final accuracy {100 * figures['final_difference']:+.2f} points, at least -0.3: ", end="")
    print(verdict(figures["final_difference"] >= -TOLERANCE))
    save(
        "adaptive",
        {
            "device": device_name(),
            "figures": figures,
            "fixed": {batch: [asdict(course) for course in courses] for batch, courses in fixed.items()},
            "adaptive": [asdict(course) for course in adaptive],
        },
    )


if __name__ == "__main__":
    main()
