"""Figure: RubberBand's plan of a study in three stages, carried out on Ray nodes that come and go.

Nodes are raylets on this machine, at most four. The study's own launch command starts them as the plan
requests them, and they end when the plan releases them. Steps sleep, as all nodes share two cores.

A first, small study measures how long nodes, starts and epochs take here. The second study is planned with
these times. Its finish and its cost must be within 15 % of the forecast, and its nodes as planned.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from common import verdict

import stretto
from stretto.core.events import Decided, Event, JobReported, NodeAdded, NodeLaunched, NodeReleased
from stretto.runs.folder import run_folder
from stretto.runs.results import TuneResult

WITHIN = 0.15
OBJECT_STORE = 80 * 1024 * 1024
STUDY = """
[study]
name = "{name}"
metric = "score"
direction = "max"
trials = {trials}
entry = "{entry}"
[halving]
rungs = "geometric"
min_epochs = 2
eta = 2
max_epochs = 8
[space]
lr = {{ float = [0.1, 1.0] }}
[limits]
deadline = "{deadline_s}s"
[cluster]
max_nodes = 4
queue_s = 0
init_s = {{ mean = {init_s:.3f}, sd = 1 }}
billing = "instance"
minimum_s = 0
[[cluster.instance]]
name = "box"
gpus = 2
usd_per_hour = 3.6
[ray]
launch = "{launch}"
start_timeout = "2m"
[profile]
epoch_s = {{ mean = {epoch_s:.3f}, sd = 0.1 }}
speedup = {{ "1" = 1.0, "2" = 1.65 }}
start_s = {start_s:.3f}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def head(folder: Path) -> Iterator[str]:
    """A Ray cluster without a single GPU; its address."""
    port = free_port()
    ray = str(Path(sys.executable).with_name("ray"))
    words = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=0", "--num-gpus=0"]
    words += [
        f"--object-store-memory={OBJECT_STORE}",
        "--include-dashboard=false",
        f"--temp-dir={folder / 'h'}",
    ]
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)  # noqa: S603 - Ray itself
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(address: str) -> None:
    host, _, port = address.rpartition(":")
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("Ray's head does not answer.")


@dataclass(frozen=True, slots=True)
class Measured:
    """How long things take here."""

    init_s: float
    epoch_s: float
    start_s: float


GUESS = Measured(init_s=5.0, epoch_s=4.0, start_s=2.0)
"""The configuration of the small study that shows it."""


def measured(events: list[Event]) -> Measured:
    """What a run has shown. A start is slow in part because its node has just come and loads the code."""
    reports = [event for event in events if isinstance(event, JobReported)]
    epochs = [r.epoch_s for one in reports for r in one.results if r.epoch_s is not None and r.workers == 1]
    return Measured(
        init_s=statistics.mean(event.init_s for event in events if isinstance(event, NodeAdded)),
        epoch_s=statistics.mean(epochs),
        start_s=statistics.mean(one.resize_s for one in reports if one.resize_s is not None),
    )


def write_study(folder: Path, name: str, *, trials: int, deadline_s: float, belief: Measured) -> Path:
    ray = Path(sys.executable).with_name("ray")
    launch = (
        f"{ray} start --block --address={{address}} --num-cpus=1 --num-gpus={{slots}} "
        f"--object-store-memory={OBJECT_STORE} --temp-dir={folder}/n{{number}} "
        "--labels=stretto-node={name},stretto-instance={instance}"
    )
    path = folder / f"{name}.toml"
    entry = Path(__file__).with_name("ray_plan_train.py").absolute()
    path.write_text(
        STUDY.format(
            name=name,
            trials=trials,
            entry=f"{entry}:train",
            deadline_s=deadline_s,
            launch=launch,
            **asdict(belief),
        )
    )
    return path


def run_study(path: Path, address: str) -> tuple[TuneResult, list[Event]]:
    runs = path.parent / "runs"
    result = stretto.tune(path, policy="rubberband", on=f"ray:{address}", folder=runs)
    return result, list(run_folder(path.stem, runs).events())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deadline", type=float, default=65.0)
    deadline_s = parser.parse_args().deadline
    os.environ["RAY_AUTH_MODE"] = "disabled"  # of a cluster that is here for a minute
    with tempfile.TemporaryDirectory(prefix="rp") as name, head(Path(name)) as address:
        folder = Path(name)
        wait_for(address)
        first = write_study(folder, "first", trials=2, deadline_s=300.0, belief=GUESS)
        seen = measured(run_study(first, address)[1])
        print(f"seen first: node {seen.init_s:.1f} s, start {seen.start_s:.1f} s, epoch {seen.epoch_s:.2f} s")
        path = write_study(folder, "plan", trials=8, deadline_s=deadline_s, belief=seen)
        result, events = run_study(path, address)
    wished = [event for event in events if isinstance(event, Decided) and event.wish is not None]
    nodes = [event for event in events if isinstance(event, NodeLaunched | NodeAdded | NodeReleased)]
    began_s = events[0].t_s
    for event in sorted([*wished, *nodes], key=lambda event: event.t_s):
        text = (
            f"wish {event.wish.nodes} back {event.wish.release}"
            if isinstance(event, Decided) and event.wish
            else ""
        )
        print(f"{event.t_s - began_s:7.1f} s  {event.kind:14} {event.subject} {text}")
    print(f"ended by {result.ended_by}, best {result.best_metric}")
    assert result.predicted_finish_s is not None
    assert result.predicted_cost_usd is not None
    for what, predicted, actual in (
        ("finish s", result.predicted_finish_s.mean, result.finished_s),
        ("cost USD", result.predicted_cost_usd.mean, result.cost_usd),
    ):
        off = predicted / actual - 1
        print(f"{what}  predicted {predicted:.3f}  actual {actual:.3f}  off {off:+.1%}", end="  ")
        print(verdict(abs(off) <= WITHIN))


if __name__ == "__main__":
    main()
