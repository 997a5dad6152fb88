"""Prediction against reality: short real studies, forecast from a probe before they start.

Every study trains small networks on scikit-learn's digits on two slots of this machine. Its forecast is the
one that `tune` makes before the start, from a probe of other configurations; nothing is adjusted afterwards.
The machine must be quiet, since no forecast includes the load of other programs.

`--calibrate` measures how much epochs and starts of a study differ from its probe, on other studies with one
configuration and other networks. Forecasts assume these values as `PACE_SD` and `START_SD`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from common import verdict

from stretto.core.events import JobReported
from stretto.core.seeds import child_rng
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.inputs.profile import MachineProfile, MeasuredProfile, believe, write_profile
from stretto.inputs.work import find_entry
from stretto.launch.tune import StudyLaunch
from stretto.planning.profile import Estimate
from stretto.profiling.probe import probe
from stretto.runs.folder import RunFolder
from stretto.runs.results import TuneResult

SLOTS = 2
SEEDS = 4
PROBE_S = 15.0
PROBED = 6
"""Configurations that a probe tries."""
OVERRUN_S = 1.0
"""Here a step and a checkpoint take less."""
CALIBRATION_SEED = 1000
"""Studies of a calibration have other seeds, too."""

TRAIN = """
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def convolutions(width):
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(width, 2 * width, 3, padding=1), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32 * width, 10),
    )


def layers(width):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10),
    )


def train(config, run):
    torch.set_num_threads(1)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    y = torch.tensor(digits.target)
    model = {"convolutions": convolutions, "layers": layers}[config["network"]](config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=config["batch"], shuffle=True)
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
network = {{ choice = ["{network}"] }}
batch = {{ choice = [{batch}] }}
width = {{ choice = {widths} }}
[machine]
slots = 2
usd_per_slot_hour = 3.6
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of study, and the deadlines its policies get."""

    name: str
    trials: int
    max_epochs: int
    widths: list[int]
    deadlines_s: dict[str, float | None]
    network: str = "convolutions"
    batch: int = 128

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.toml"
        text = STUDY.format(
            trials=self.trials,
            max_epochs=self.max_epochs,
            network=self.network,
            batch=self.batch,
            widths=self.widths,
        )
        path.write_text(text, encoding="utf-8")
        return path


REPORTED = (
    Kind(
        name="wide",
        trials=8,
        max_epochs=12,
        widths=[24, 32],
        deadlines_s={"rubberband": 30.0, "hypersched": 12.0, "asha": None},
    ),
    Kind(
        name="narrow",
        trials=16,
        max_epochs=16,
        widths=[8, 16],
        deadlines_s={"rubberband": 30.0, "hypersched": None, "asha": None},
    ),
)
CALIBRATED = tuple(
    Kind(
        name=f"{network}-{width}-{batch}",
        trials=6,
        max_epochs=8,
        widths=[width],
        deadlines_s={"random": None, "rubberband": 40.0},
        network=network,
        batch=batch,
    )
    for network, width, batch in (("convolutions", 20, 64), ("layers", 512, 32), ("layers", 1024, 64))
)


@dataclass(frozen=True, slots=True)
class Case:
    """One study: what was measured, what was forecast, and what happened."""

    name: str
    measured: MeasuredProfile
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


def report(seeds: int) -> None:
    print("Prediction against reality: real studies on two slots, forecast from a probe before they start")
    cases = []
    for case in _cases(REPORTED, range(seeds)):
        forecast = f"{case.finish_s.mean:.1f} s ({case.finish_s.p10:.1f}-{case.finish_s.p90:.1f})"
        print(f"  {case.name:24s} forecast {forecast:24s} came {case.result.finished_s:5.1f} s", flush=True)
        cases.append(case)
    _judge(cases)


def calibrate(seeds: int) -> None:
    """For each study: its mean epoch and its usual start, relative to the probe's."""
    print("Calibration: epochs and starts of studies of one configuration, relative to their probe")
    paces, starts = [], []
    for case in _cases(CALIBRATED, range(CALIBRATION_SEED, CALIBRATION_SEED + seeds)):
        reports = [one for one in RunFolder(case.result.run).events() if isinstance(one, JobReported)]
        starts_s = [one.resize_s for one in reports if one.resize_s is not None][SLOTS:]
        measured, believed = case.measured, believe(case.measured)
        assert isinstance(believed, MachineProfile)
        busy = 1 if case.result.policy == "rubberband" else SLOTS  # with time enough its plan holds one slot
        probed_s = fmean(measured.epoch_times_s(1)) * believed.epoch_factor(busy)
        pace = fmean(_epochs_s(reports)) / probed_s
        cost = (median(starts_s) + measured.first_epoch_extra_s) / believed.start_s_at(busy)
        print(f"  {case.name:32s} epochs {pace:.3f}  starts {cost:.2f}", flush=True)
        paces.append(math.log(pace))
        starts.append(math.log(cost))
    for what, logs in (("epochs", paces), ("starts", starts)):
        spread = fmean(value * value for value in logs) ** 0.5
        print(f"  {what}: off by {spread:.3f} (rms of logarithms), {fmean(logs):+.3f} on average")


def _epochs_s(reports: Sequence[JobReported]) -> Iterator[float]:
    """From one epoch's end to the next, of single workers: as a probe times them."""
    ended_s: dict[str, float] = {}
    for one in reports:
        if one.results and one.results[0].workers == 1:
            if one.job_id in ended_s and one.resize_s is None:
                yield one.t_s - ended_s[one.job_id]
            ended_s[one.job_id] = one.t_s


def _cases(kinds: tuple[Kind, ...], seeds: range) -> Iterator[Case]:
    with tempfile.TemporaryDirectory(prefix="stretto-prediction-") as place:
        folder = Path(place)
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")
        for kind in kinds:
            path = kind.write(folder)
            for policy, deadline_s in kind.deadlines_s.items():
                for seed in seeds:
                    request = TuneRequest(
                        study=path,
                        policy=policy,
                        deadline_s=deadline_s,
                        slots=SLOTS,
                        runs=folder / "runs",
                        seed=seed,
                        name=f"{kind.name}-{policy}-{seed}",
                    )
                    case = _tune(check_request(request))
                    if case is not None:
                        yield case


def _tune(checked: CheckedStudy) -> Case | None:
    checked.folder.path.mkdir(parents=True)
    measured = _probe(checked)
    write_profile(checked.folder.profile, measured)
    with checked.opened() as target:
        launch = StudyLaunch(checked, target)
        prepared = launch.prepare()
        result = launch.start(prepared)
    finish_s, cost_usd = prepared.expectation.finish_s, prepared.expectation.cost_usd
    if finish_s is None or cost_usd is None:
        print(f"  {checked.folder.name}: no forecast", file=sys.stderr)
        return None
    deadline_s = prepared.tuning.limits.deadline_s
    return Case(checked.folder.name, measured, finish_s, cost_usd, deadline_s, result)


def _probe(checked: CheckedStudy) -> MeasuredProfile:
    """The forecast that `tune` makes before a run, from configurations that it will not try."""
    outline = checked.outline
    rng = child_rng(10**6, "probe", checked.folder.name)
    configs = [outline.space.sample(rng) for _ in range(PROBED)]
    work = find_entry("train.py:train", outline.path.parent)
    return probe(work, configs, slots=SLOTS, time_s=PROBE_S, study=outline.study)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="studies of each kind")
    parser.add_argument("--calibrate", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (calibrate if given.calibrate else report)(given.seeds)


if __name__ == "__main__":
    main()
