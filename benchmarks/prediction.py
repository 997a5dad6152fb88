"""Prediction against reality: short real studies, forecast from a probe before they start.

Every study trains small convolutional networks on scikit-learn's digits on two slots of this machine. The
forecast is the one `tune` keeps before it begins, from a probe a minute or two earlier; nothing is adjusted
afterwards. The machine must be quiet: what others do to it meanwhile is not in any forecast.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from common import verdict

from stretto.app.probe import probe
from stretto.app.profile_file import MeasuredProfile, write_profile
from stretto.app.real_request import TuneRequest, check_request
from stretto.app.real_result import TuneResult
from stretto.app.real_work import find_entry
from stretto.app.study_file import read_outline
from stretto.app.tune import prepare, start
from stretto.core.seeds import child_rng
from stretto.planning.forecast import Estimate

SLOTS = 2
SEEDS = 5
PROBE_S = 25.0
PROBED = 6
"""Configurations that a probe tries."""
OVERRUN_S = 1.0
"""A step and a checkpoint take less here."""

TRAIN = """
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train(config, run):
    torch.set_num_threads(1)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    y = torch.tensor(digits.target)
    width = config["width"]
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(width, 2 * width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32 * width, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=128, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(1000):
        for a, b in loader:
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            optimizer.step()
        with torch.no_grad():
            run.report(accuracy=(model(x[1500:]).argmax(1) == y[1500:]).float().mean().item())
"""

STUDY = """
[study]
name = "digits"
metric = "accuracy"
direction = "max"
trials = {trials}
entry = "train.py:train"
[halving]
rungs = "geometric"
min_epochs = 2
eta = 2
max_epochs = {max_epochs}
[space]
lr = {{ log = [1e-3, 0.5] }}
width = {{ choice = {widths} }}
[machine]
slots = 2
usd_per_slot_hour = 3.6
"""


@dataclass(frozen=True, slots=True)
class Size:
    """One kind of study, and the deadlines its policies get."""

    name: str
    trials: int
    max_epochs: int
    widths: list[int]
    deadlines_s: dict[str, float | None]

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.toml"
        text = STUDY.format(trials=self.trials, max_epochs=self.max_epochs, widths=self.widths)
        path.write_text(text, encoding="utf-8")
        return path


SIZES = (
    Size("wide", 6, 12, [24, 32], {"rubberband": 30.0, "hypersched": 12.0}),
    Size("narrow", 8, 16, [12, 16], {"rubberband": 30.0, "hypersched": None}),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One study: what was forecast, and what came."""

    name: str
    finish_s: Estimate
    cost_usd: Estimate
    deadline_s: float | None
    result: TuneResult

    @property
    def overrun_s(self) -> float:
        return 0.0 if self.deadline_s is None else max(self.result.finished_s - self.deadline_s, 0.0)

    @property
    def pairs(self) -> tuple[tuple[Estimate, float], tuple[Estimate, float]]:
        return ((self.finish_s, self.result.finished_s), (self.cost_usd, self.result.cost_usd))


def main(seeds: int = SEEDS) -> None:
    print("Prediction against reality: real studies on two slots, forecast from a probe before they start")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="stretto-prediction-") as place:
        cases = list(_cases(Path(place), seeds))
    for case in cases:
        forecast = f"{case.finish_s.mean:.1f} s ({case.finish_s.p10:.1f}-{case.finish_s.p90:.1f})"
        print(f"  {case.name:24s} forecast {forecast:24s} came {case.result.finished_s:5.1f} s")
    _judge(cases)


def _cases(folder: Path, seeds: int) -> Iterator[Case]:
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    for size in SIZES:
        path = size.write(folder)
        for policy, deadline_s in size.deadlines_s.items():
            measured = _probe(path, folder, policy)
            for seed in range(seeds):
                runs = folder / "runs"
                request = TuneRequest(
                    study=path, policy=policy, deadline_s=deadline_s, slots=SLOTS, runs=runs, seed=seed
                )
                case = _tune(request, measured)
                if case is not None:
                    yield case


def _probe(path: Path, folder: Path, policy: str) -> MeasuredProfile:
    """As `tune` does before a run, of other configurations than those it will try."""
    outline = read_outline(path)
    rng = child_rng(10**6, "probe", f"{path.stem}-{policy}")
    configs = [outline.space.sample(rng) for _ in range(PROBED)]
    work = find_entry("train.py:train", folder)
    return probe(work, configs, slots=SLOTS, time_s=PROBE_S, study=outline.study)


def _tune(request: TuneRequest, measured: MeasuredProfile) -> Case | None:
    name = f"{request.study.stem}-{request.policy}-{request.seed}"
    checked = check_request(replace(request, name=name))
    checked.folder.path.mkdir(parents=True)
    write_profile(checked.folder.profile, measured)
    prepared = prepare(checked)
    finish_s, cost_usd = prepared.expectation.finish_s, prepared.expectation.cost_usd
    result = start(prepared)
    if finish_s is None or cost_usd is None:
        print(f"  {name}: no forecast", file=sys.stderr)
        return None
    return Case(name, finish_s, cost_usd, prepared.tuning.limits.deadline_s, result)


def _judge(cases: list[Case]) -> None:
    pairs = [pair for case in cases for pair in case.pairs]
    errors = {
        what: fmean(abs(case.pairs[index][1] / case.pairs[index][0].mean - 1.0) for case in cases)
        for index, what in enumerate(("finish", "cost"))
    }
    open_pairs = [(estimate, came) for estimate, came in pairs if estimate.p90 > estimate.p10]
    held = fmean(estimate.p10 <= came <= estimate.p90 for estimate, came in open_pairs)
    overrun_s = max(case.overrun_s for case in cases)
    for what, error in errors.items():
        print(f"  mean absolute error of {what}: {error:.1%} (at most 10 %): {verdict(error <= 0.1)}")
    print(f"  [P10, P90] holds {held:.0%} of {len(open_pairs)} (70-90 %): {verdict(0.7 <= held <= 0.9)}")
    print(f"  longest overrun of a deadline: {overrun_s:.2f} s: {verdict(overrun_s <= OVERRUN_S)}")
    print(f"  {len(cases)} studies (at least 20): {verdict(len(cases) >= 20)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
