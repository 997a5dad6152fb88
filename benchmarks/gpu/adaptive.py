"""An adaptive batch against fixed ones: ResNet-18 on Fashion-MNIST (about 18 minutes on an H200).

    PYTHONPATH=src python3 benchmarks/gpu/adaptive.py FOLDER_OF_IDX_GZ_FILES
    PYTHONPATH=src python3 benchmarks/gpu/adaptive.py --seeds 3 --first-seed 5 FOLDER   (some of the seeds)
    PYTHONPATH=src python3 benchmarks/gpu/adaptive.py --merge FILE FILE ...     (saved ones, judged together)

The initial batch is 64, as in introductions to this data set. The learning rate is the usual one for such
networks, 0.1 at a batch of 256, in proportion. All runs train for the same statistical work (steps at the
initial batch). Their learning rates are scaled by the same rule and follow the same schedule over that work.
All runs of a seed take turns, because the speed of a machine varies and half of these steps are bound by the
processor. The target is the mean final accuracy of the fixed initial batch less 0.3 points. Final accuracies
may differ by as much. Only training time counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import DEVICE, OnCard, as_it_is, device_name, now_s, resnet18, save, use_tensor_cores, verdict
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

from stretto.core.allocation import BatchChoice
from stretto.torch import Run

INITIAL_BATCH, MAX_BATCH = 64, 1024
FIXED = (64, 128, 256, 512, 1024)
LR, MOMENTUM, WEIGHT_DECAY = 0.025, 0.9, 5e-4
STRETCH, STRETCHES = 6000, 30
"""Examples' worth of work between two looks at the accuracy, and how many such: three passes in all."""
TEST_BATCH = 2000
TOLERANCE = 0.003
SOONER, NEAR_BEST = 1.5, 1.1


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
    """One run of the training library; a fixed batch is one ordered from outside."""

    def __init__(self, data: Data, batch: int | None, seed: int) -> None:
        torch.manual_seed(seed)
        self.course = Course()
        self._data = data
        self._run = Run(seed=seed)
        self._model = resnet18(channels=1)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        if batch is not None:
            self._run._engine.batching.order = BatchChoice(batch)  # noqa: SLF001 - as a controller would

    def train(self, stretches: int) -> Iterator[None]:
        """Trains in `stretches` parts, each worth `STRETCH` examples; yields after each part."""
        time_s = 0.0
        data = OnCard(self._data.images, self._data.labels)
        sampler = RandomSampler(data, num_samples=STRETCH)
        loader = DataLoader(data, batch_size=INITIAL_BATCH, sampler=sampler, collate_fn=as_it_is)
        model, optimizer, loader = self._run.prepare(
            self._model, self._optimizer, loader, adaptive=True, max_batch_size=MAX_BATCH, accumulate=False
        )
        for stretch in self._run.epochs(stretches):
            for group in optimizer.param_groups:
                group["lr"] = LR * 0.5 * (1 + math.cos(math.pi * stretch / stretches))
            began_s = now_s()
            for images, labels in loader:
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(model(images), labels))
                optimizer.step()
            time_s += now_s() - began_s
            self.course.times_s.append(time_s)
            self.course.accuracies.append(self._accuracy())
            self.course.batches.append(self._run.batch_size)
            yield

    @torch.no_grad()
    def _accuracy(self) -> float:
        self._model.eval()
        batches = torch.split(self._data.test_images, TEST_BATCH)
        guesses = [self._model(images).argmax(dim=1) for images in batches]
        self._model.train()
        return float((torch.cat(guesses) == self._data.test_labels).float().mean())


@dataclass(frozen=True)
class Results:
    """One course per seed: of every fixed batch, and of the adaptive one."""

    device: str
    seeds: list[int]
    fixed: dict[int, list[Course]]
    adaptive: list[Course]

    def merged(self, other: Results) -> Results:
        """Both together; they must not share a seed, and must have the same fixed batches."""
        common = set(self.seeds) & set(other.seeds)
        if common or self.fixed.keys() != other.fixed.keys():
            raise SystemExit(
                f"These cannot be judged together: fixed batches {[*self.fixed]} and {[*other.fixed]}, "
                f"seeds {self.seeds} and {other.seeds}."
            )
        return Results(
            device=self.device if self.device == other.device else f"{self.device}, {other.device}",
            seeds=self.seeds + other.seeds,
            fixed={batch: courses + other.fixed[batch] for batch, courses in self.fixed.items()},
            adaptive=self.adaptive + other.adaptive,
        )


def read_results(path: Path, batches: list[int]) -> Results:
    """What an earlier run saved, of these fixed batches."""

    def courses(saved: list[dict[str, Any]]) -> list[Course]:
        return [Course(**course) for course in saved]

    saved = json.loads(path.read_text(encoding="utf-8"))
    fixed = {int(batch): courses(column) for batch, column in saved["fixed"].items() if int(batch) in batches}
    return Results(saved["device"], saved["seeds"], fixed, courses(saved["adaptive"]))


def judge(results: Results) -> None:
    """The figures: medians over seeds of the time to the target, and mean final accuracies."""
    fixed, adaptive = results.fixed, results.adaptive
    target = statistics.mean(course.final for course in fixed[INITIAL_BATCH]) - TOLERANCE
    to_target_s = {
        batch: statistics.median(course.reached_s(target) for course in courses)
        for batch, courses in fixed.items()
    }
    own_s = statistics.median(course.reached_s(target) for course in adaptive)
    print(f"  target accuracy {target:.4f}; medians over seeds {' '.join(map(str, results.seeds))}")
    print("  batch        to the target, s   in all, s   final accuracy   reached")
    for name, courses in [*((f"fixed {batch}", fixed[batch]) for batch in fixed), ("adaptive", adaptive)]:
        print_row(name, courses, target)
    sooner, against_best = to_target_s[INITIAL_BATCH] / own_s, own_s / min(to_target_s.values())
    difference = statistics.mean(course.final for course in adaptive) - (target + TOLERANCE)
    print(
        f"  {sooner:.2f}x sooner than fixed {INITIAL_BATCH}, at least {SOONER}: {verdict(sooner >= SOONER)}"
    )
    print(f"  {against_best:.2f} of the best fixed batch's time, at most {NEAR_BEST}: ", end="")
    print(verdict(against_best <= NEAR_BEST))
    print(f"  final accuracy {100 * difference:+.2f} points, at least -0.3: ", end="")
    print(verdict(difference >= -TOLERANCE))


def print_row(name: str, courses: list[Course], target: float) -> None:
    reached_s = [course.reached_s(target) for course in courses]
    all_s = statistics.median(course.times_s[-1] for course in courses)
    final = statistics.mean(course.final for course in courses)
    there = sum(math.isfinite(time_s) for time_s in reached_s)
    print(
        f"  {name:10} {statistics.median(reached_s):18.2f} {all_s:11.2f} {final:16.4f} "
        f"{there:6} of {len(courses)}"
    )


def train_in_turns(data: Data, batches: Sequence[int | None], seed: int, stretches: int) -> list[Course]:
    trainings = [Training(data, batch, seed) for batch in batches]
    for _ in zip(*(training.train(stretches) for training in trainings), strict=True):
        pass
    return [training.course for training in trainings]


def train_all(data: Data, seeds: list[int], batches: list[int], stretches: int) -> Results:
    """Every batch size with every seed, saved after each seed."""
    train_in_turns(data, batches, 0, 1)  # the card's libraries load on first use
    results = Results(device_name(), [], {batch: [] for batch in batches}, [])
    for seed in seeds:
        with contextlib.redirect_stdout(io.StringIO()):  # runs say why they change their batch
            *fixed, adaptive = train_in_turns(data, [*batches, None], seed, stretches)
        for batch, course in zip(batches, fixed, strict=True):
            results.fixed[batch].append(course)
        results.adaptive.append(adaptive)
        results.seeds.append(seed)
        save(f"adaptive_{seeds[0]}", asdict(results))
        newest = results.adaptive[-1]
        print(f"  seed {seed}: adaptive {newest.final:.4f} in {newest.times_s[-1]:.1f} s, batches ", end="")
        print(" ".join(str(batch) for batch in dict.fromkeys(newest.batches)), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", type=Path, nargs="?")
    source.add_argument("--merge", type=Path, nargs="+", help="judge saved results together, train nothing")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--examples", type=int, help="train on this many examples, test on a sixth of that")
    parser.add_argument("--stretches", type=int, default=STRETCHES)
    parser.add_argument("--fixed", type=int, nargs="+", default=list(FIXED))
    options = parser.parse_args()
    if options.merge:
        saved = (read_results(path, options.fixed) for path in options.merge)
        results = functools.reduce(Results.merged, saved)
        print(f"Adaptive batch on Fashion-MNIST, {results.device}")
    else:
        use_tensor_cores()
        data = load(options.folder, options.examples)
        print(f"Adaptive batch on Fashion-MNIST, {device_name()}, torch {torch.__version__}", flush=True)
        seeds = list(range(options.first_seed, options.first_seed + options.seeds))
        results = train_all(data, seeds, options.fixed, options.stretches)
    judge(results)


if __name__ == "__main__":
    main()
