"""Figure: how much of a core the controller takes while eight jobs train and report: at most 2 %.

`stretto tune` runs a study of eight trials on eight slots, whose steps are mostly sleep. We count the
processor time of the command's own process, without its workers, once all of them train.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import verdict
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

JOBS = 8
SECONDS = 30.0
MOST = 0.02
STEP_S = 0.05
STEPS = 100
"""Steps of an epoch, so that each job reports a result every five seconds."""
BEGUN = "begun"

STUDY = f"""
[study]
name = "load"
metric = "loss"
direction = "min"
trials = {JOBS}
entry = "{Path(__file__).absolute()}:train"
[halving]
rungs = "geometric"
min_epochs = 4
eta = 2
max_epochs = 100
[space]
lr = {{ log = [1e-3, 1e-1] }}
[limits]
deadline = "1h"
[profile]
epoch_s = {STEP_S * STEPS}
speedup = {{ "1" = 1.0, "2" = 1.5 }}
[machine]
slots = {JOBS}
"""


def train(config: dict[str, Any], run: Run) -> None:
    """A trial."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 8, 4)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    Path("/proc/self/fd/1").readlink().with_name(BEGUN).touch()
    for _epoch in run.epochs(100):
        for (x,) in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            time.sleep(STEP_S)
        run.report(loss=loss.item())


def cpu_s(pid: int) -> float:
    """Processor time of one process, its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, seconds: float) -> float:
    """The share of a core that the controller takes."""
    (folder / "load.toml").write_text(STUDY, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("stretto")), "tune", "load.toml"]
    with (folder / "log").open("wb") as log:
        controller = subprocess.Popen(  # noqa: S603 - our own command
            command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while len(list(folder.glob(f"runs/load/jobs/*/{BEGUN}"))) < JOBS:
            if controller.poll() is not None:
                sys.exit((folder / "log").read_text(encoding="utf-8"))
            time.sleep(0.1)
        time.sleep(2.0)  # the last of them has to join
        before_s, began_s = cpu_s(controller.pid), time.monotonic()
        time.sleep(seconds)
        return (cpu_s(controller.pid) - before_s) / (time.monotonic() - began_s)
    finally:
        controller.send_signal(signal.SIGINT)
        controller.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="stretto-load-") as folder:
        share = measure(Path(folder), seconds)
    print(f"Controller with {JOBS} running jobs: {share:.2%} of a core over {seconds:g} s")
    print(f"  at most {MOST:.0%}: {verdict(share <= MOST)}")


if __name__ == "__main__":
    main()
