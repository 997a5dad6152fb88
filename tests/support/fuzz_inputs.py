"""Every kind of file that is read, whole and spoilt, and what must come of a spoilt one.

A file of a user's is refused in a sentence, or what it says is shown. A file of our own is found to be
damaged, or it says what it said. Nothing ends in a traceback, and nothing in a warning.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from fuzz_spoil import ANY_TEXT, JSON_TEXT, spoil_line, spoiled, spoiled_bytes
from inputs import SNAPSHOT, WORKLOAD
from stretto.cli.decide import _show as show_decision
from stretto.cli.explain import explain as explain_command
from stretto.cli.report import report as report_command
from stretto.control.state import RunState
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.errors import StrettoError
from stretto.core.events import Decided, Event, JobSubmitted, RunStarted
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.observations import SpeedSample
from stretto.core.resources import Resources
from stretto.core.seeds import child_rng
from stretto.inputs.jobs import complete, read_jobs
from stretto.inputs.profile import MeasuredProfile, TimedEpoch, believe, read_profile, write_profile
from stretto.inputs.snapshot import read_snapshot
from stretto.inputs.study import read_outline, read_study
from stretto.journal.codec import decode, encode
from stretto.journal.folds.history import history_of
from stretto.models.speed import AllReduceSpeed
from stretto.policies.registry import make_policy
from stretto.pricing.price_list import read_price_list
from stretto.report.plan_text import plan_text
from stretto.report.tables import metrics_text
from stretto.runs.explain import job_lines
from stretto.runs.folder import RunFolder, run_folder
from stretto.search.study import Direction
from stretto.simulation.decide import decide
from stretto.simulation.jobs import Setup as ClusterSetup
from stretto.simulation.jobs import simulate
from stretto.simulation.plan import plan, plan_json
from stretto.substrate.elastic.command_output import CommandSetup, EpochMark, Progress, Trial, read_report
from stretto.system.threads import one_blas_thread
from stretto.torch.checkpoint import CheckpointStore
from stretto.wire.checkpoints import META_FILE, newest_best, whole_checkpoints
from stretto.worlds.applications import builtin_catalogue
from stretto.worlds.curve_files import load_curves
from stretto.worlds.workload_files import load_workload

CALL = "from stretto.cli.start import main; main()"
LONGEST_SENTENCE = 2000
METRICS = "metrics.jsonl"
"""Commands may write it themselves, so that it says what it says."""
WITHIN_S = 60
"""Whoever takes longer over one small file hangs."""


class Kind(StrEnum):
    """What is spoilt."""

    SNAPSHOT = "snapshot"
    TOML = "TOML of studies and jobs"
    CSV = "CSV of workloads, logs, curves and prices"
    META = "meta.json of checkpoints"
    JOURNAL = "journal"
    LINES = "standard output of commands"
    OTHERS = "other files of a run"


OURS = frozenset({Kind.META, Kind.JOURNAL, Kind.OTHERS})


class Subject(Protocol):
    """One kind of file."""

    def spoil(self, chance: random.Random) -> bytes:
        """Its content, spoilt."""

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        """What is shown of it; StrettoError if it is refused, AssertionError if that is not right."""

    def command(self, data: bytes, folder: Path) -> list[str]:
        """Write it into a folder, and the arguments of `stretto`, called there, that make it read it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of one spoilt file."""

    refused: bool
    problem: str = ""


class HangError(Exception):
    """It took too long."""


def try_it(subject: Subject, data: bytes, folder: Path, chance: random.Random) -> Tried:
    """Read one spoilt file in this process."""
    try:
        with _in_time(), warnings.catch_warnings():
            warnings.simplefilter("error")
            shown = subject.read(data, folder, chance)
    except StrettoError as error:
        return Tried(refused=True, problem=wrong_with_sentence(str(error)))
    except Exception:  # noqa: BLE001 - that is what is looked for
        return Tried(refused=False, problem=traceback.format_exc(limit=-6))
    try:
        shown.encode()
    except UnicodeEncodeError as error:
        return Tried(refused=False, problem=f"what is shown cannot be printed: {error}")
    return Tried(refused=False)


def try_command(subject: Subject, data: bytes, folder: Path) -> Tried:
    """Read one spoilt file through the command line."""
    arguments = subject.command(data, folder)
    command = [sys.executable, "-W", "error", "-c", CALL, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=2 * WITHIN_S, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        return Tried(refused=False, problem=f"stretto {' '.join(arguments)} hangs")
    said = done.stderr
    if "Traceback" in said or "Warning" in said or done.returncode not in {0, 1, 2, 3}:
        return Tried(
            refused=False, problem=f"stretto {' '.join(arguments)}: {done.returncode}: {said[-2000:]}"
        )
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if not done.stdout.strip() and not errors:
        return Tried(refused=False, problem=f"stretto {' '.join(arguments)} says nothing, {done.returncode}")
    return Tried(refused=bool(errors), problem=wrong_with_sentence("\n".join(errors)) if errors else "")


def wrong_with_sentence(text: str) -> str:
    """What is wrong with an error as a user reads it; empty: nothing."""
    if not text.strip():
        return "the error says nothing"
    if len(text) > LONGEST_SENTENCE:
        return f"the error has {len(text)} characters: {text[:200]!r}"
    odd = sorted({character for character in text if not character.isprintable() and character != "\n"})
    return f"the error has {odd!r} in it: {text[:200]!r}" if odd else ""


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def hangs(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise HangError(f"not read after {WITHIN_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(WITHIN_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _shown_by(show: Callable[[], object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        show()
    return out.getvalue()


# Users' files


RICH_SNAPSHOT: dict[str, Any] = {
    "nodes": {
        "a": 4,
        "b": {"gpu": 4, "cpu": 16.0, "memory_gib": 128.0, "bandwidth_gbps": 10.0},
        "c": {"gpu": 8},
    },
    "jobs": [
        *SNAPSHOT["jobs"],
        {
            "key": "three",
            "application": "bert",
            "base": {"b": 2},
            "perf_params": [0.2, 0.02, 0.3, 0.01, 0.1, 0.01, 2.0],
            "init_batch_size": 64,
            "max_batch_size": 1024,
            "batch_size": 128,
            "accumulation": False,
            "min_replicas": 1,
            "max_replicas": 16,
            "num_replicas": 4,
            "tier": "elastic",
            "attained_service": 1200.5,
            "num_restarts": 2,
            "creation_timestamp": 20.0,
            "work_total": 10000,
            "work_done": 250.5,
        },
        {"key": "four", "max_replicas": 2, "tier": "rigid", "num_replicas": 2, "preemptible": False},
    ],
    "time": 1000.0,
    "note": "a note",
}
"""Every field once."""


class Snapshots:
    POLICIES = ("pollux", "optimus", "tiresias", "drf", "tetris", "srtf", "fifo")

    def spoil(self, chance: random.Random) -> bytes:
        return spoiled(chance, json.dumps(chance.choice((SNAPSHOT, RICH_SNAPSHOT))), JSON_TEXT)

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        path = folder / "cluster.json"
        path.write_bytes(data)
        answer = decide(read_snapshot(path), chance.choice(self.POLICIES))
        return json.dumps(answer.as_dict(), allow_nan=False) + _shown_by(lambda: show_decision(answer))

    def command(self, data: bytes, folder: Path) -> list[str]:
        (folder / "cluster.json").write_bytes(data)
        return ["decide", "cluster.json", "--policy", self.POLICIES[len(data) % len(self.POLICIES)]]


STUDY = """\
[study]
name = "resnet"
metric = "accuracy"
direction = "max"
trials = 8
sampler = "random"
command = ["true", "--lr", "{lr}"]
checkpoints = true

[halving]
rungs = "additive"
min_epochs = 4
eta = 2
max_epochs = 28

[space]
lr = { log = [1e-4, 1.0] }
momentum = { choice = [0.9, 0.95, "none", true] }
width = { int = [16, 128] }
drop = { float = [0.0, 0.5] }

[limits]
deadline = "40m"
budget_usd = 30
q = 0.9

[machine]
slots = 2
usd_per_slot_hour = 0.5

[cluster]
instances = ["p3.8xlarge"]
max_nodes = 4
nodes = 2
billing = "instance"
minimum_s = 60
granularity_s = 1
dataset_gb = 1
usd_per_gb = 0.01
queue_s = { mean = 40, sd = 10 }
init_s = { mean = 30, sd = 8 }

[[cluster.instance]]
name = "our-box"
gpus = 8
usd_per_hour = 4.0
speed = 1.5

[ray]
launch = "./up {number} {address} {slots} {name} {instance}"
release = "./down {number}"
start_timeout = "10m"
slot = "gpu"

[profile]
epoch_s = { mean = 35, trial_sd = 3, node_sd = 1, epoch_sd = 1 }
speedup = { "1" = 1.0, "2" = 1.87, "4" = 3.42, "8" = 5.6 }
spanning = 0.1
start_s = 60

[world]
curves = "builtin:resnet"
epoch_s = { mean = 40, sd = 6 }
"""


class Studies:
    def spoil(self, chance: random.Random) -> bytes:
        return spoiled(chance, STUDY, ANY_TEXT)

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        path = folder / "study.toml"
        path.write_bytes(data)
        outline = read_outline(path)
        run_folder(outline.study.name, folder)
        config = outline.space.sample(chance_rng(chance))
        job = _job_of("trial", Tier.RIGID, study=outline.study.name, config=config)
        shown = json.dumps(outline.tables, allow_nan=False) + _journaled(job)
        file = read_study(path)
        load_curves(file.world.curves, folder=folder, direction=file.tuning.study.direction)
        if chance.random() < 0.05:
            planned = plan(file, planner="published")
            shown += json.dumps(plan_json(planned), allow_nan=False)
            shown += plan_text(planned.tuning, planned.outcome)
        return shown

    def command(self, data: bytes, folder: Path) -> list[str]:
        (folder / "study.toml").write_bytes(data)
        if len(data) % 2:
            return ["plan", "study.toml", "--set", "rubberband.planner=published"]
        return ["simulate", "--study", "study.toml", "--policy", "asha,random"]


JOBS = """\
[machine]
slots = 2
usd_per_slot_hour = 0.5

[[job]]
name = "small"
command = ["true", "--lr", "{lr}", "--out", "{folder}"]
epochs = 10
config = { lr = 0.1, width = 64, kind = "a", fast = true }

[[job]]
name = "large"
command = ["true", "{batch}", "{{x}}"]
epochs = 30
submit_at = "30s"
gpus = { min = 1, max = 2 }
tier = "adaptive"
batch = { initial = 64, max = 1024, per_gpu = [16, 256], accumulation = true }
config = { lr = 0.1, width = 256 }
"""


class Jobs:
    def spoil(self, chance: random.Random) -> bytes:
        return spoiled(chance, JOBS, ANY_TEXT)

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        del chance
        path = folder / "jobs.toml"
        path.write_bytes(data)
        file = read_jobs(path)
        jobs = [complete(spec, None, 8) for spec in file.jobs]
        for job in jobs:
            with tempfile.TemporaryDirectory(dir=folder) as run:
                (Path(run) / job.id).mkdir()
        return json.dumps(file.tables, allow_nan=False) + "\n".join(map(_journaled, jobs))

    def command(self, data: bytes, folder: Path) -> list[str]:
        """One job too many for the machine: what is right in it is not run."""
        (folder / "jobs.toml").write_bytes(
            data + b'\n[[job]]\nname = "-"\nepochs = 1\ncommand = ["true"]\ngpus = { min = 64 }\n'
        )
        return ["run", "jobs.toml", "--slots", "2", "--yes"]


LOG = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:00:00,3600,1,3600,a
2017-10-09 07:10:00,7200,4,28800,b
2017-10-09 08:00:00,600,2,1200,a
"""
CURVES = """trial,epoch,value,lr,kind,epoch_s
a,1,0.31,0.1,x,35.2
a,2,0.44,0.1,x,34.8
b,1,0.2,0.01,y,35.2
b,2,nan,0.01,y,34.8
"""
PRICES = """instance,gpus,usd_per_hour,gpu_type,speed
our-box,8,4.0,V100,1
small,1,0.526,T4,0.4
"""


class Tables:
    """Each of the four in turn."""

    SEEDS = (WORKLOAD, LOG, CURVES, PRICES)

    def spoil(self, chance: random.Random) -> bytes:
        return spoiled(chance, chance.choice(self.SEEDS), (*ANY_TEXT, spoil_line))

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        """Told apart by the header, as it was before it was spoilt; a lost one is tried as any."""
        path = folder / "table.csv"
        path.write_bytes(data)
        if b"usd_per" in data[:80]:
            return repr(read_price_list(path))
        if b"epoch" in data[:80]:
            curves = load_curves("csv:table.csv", folder=folder, direction=Direction.MAX)
            return repr(curves)
        workload = load_workload(path, builtin_catalogue(), chance_rng(chance))
        run = simulate(workload, "fifo", ClusterSetup(nodes=gpu_nodes(4, 4)))
        assert run.metrics.jobs == len(workload.jobs)
        return metrics_text([run.metrics])

    def command(self, data: bytes, folder: Path) -> list[str]:
        (folder / "table.csv").write_bytes(data)
        if b"usd_per" in data[:80]:
            cluster = 'instances = ["our-box"]\nprices = "table.csv"'
            text = STUDY.replace('instances = ["p3.8xlarge"]', cluster).split("[[cluster.instance]]")
            (folder / "study.toml").write_text(
                text[0] + text[1].partition("[profile]")[2].join(("[profile]", ""))
            )
            return ["plan", "study.toml", "--set", "rubberband.planner=published"]
        if b"epoch" in data[:80]:
            _write_curves_study(folder, "csv:table.csv", "max")
            return ["simulate", "--study", "study.toml", "--policy", "asha"]
        return ["simulate", "table.csv", "--policy", "fifo"]


class TaskSets:
    """Learning curves as TaskSet has them."""

    def spoil(self, chance: random.Random) -> bytes:
        runs = [
            {"hp": {"lr": 0.1 * run, "kind": "x"}, "valid": {"loss": [2.0, 1.5, 1.0 / run]}} for run in (1, 2)
        ]
        return spoiled(chance, json.dumps(runs), JSON_TEXT)

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        del chance
        (folder / "runs.json").write_bytes(data)
        return repr(load_curves("taskset:runs.json", folder=folder, direction=Direction.MIN))

    def command(self, data: bytes, folder: Path) -> list[str]:
        (folder / "runs.json").write_bytes(data)
        _write_curves_study(folder, "taskset:runs.json", "min")
        return ["simulate", "--study", "study.toml", "--policy", "asha"]


def _write_curves_study(folder: Path, curves: str, direction: str) -> None:
    """A study of two trials and two epochs on a table of curves."""
    head, _, rest = STUDY.partition("[space]")
    text = (head + "[limits]" + rest.partition("[limits]")[2]).replace("builtin:resnet", curves)
    for old, new in (
        ("max_epochs = 28", "max_epochs = 2"),
        ('rungs = "additive"\nmin_epochs = 4', "rungs = [1]"),
        ("trials = 8", "trials = 2"),
        ('direction = "max"', f'direction = "{direction}"'),
    ):
        text = text.replace(old, new)
    (folder / "study.toml").write_text(text)


LINES = (
    '{"work_done": 120, "epoch": 3, "step_s": 0.11, "sync_s": 0.02, "loss": 0.5, "grad_sqr": 1,"grad_var":9}',
    '{"epoch": 1, "accuracy": 0.91}',
    '{"accuracy": 0.5, "step_s": 0.2, "loss": null}',
    '{"epoch": 2, "accuracy": NaN, "note": "text"}',
)


def _job_of(job_id: str, tier: Tier, **others: Any) -> Job:
    return Job(
        id=job_id,
        application="tiny",
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1), max=4),
        batch=BatchLimits(initial=16, requested=16, max=64, per_gpu_min=1, per_gpu_max=64),
        work=Work(units_per_epoch=10.0, epochs=20),
        tier=tier,
        **others,
    )


class Output:
    """Lines of a job's standard output; what is believed of the job after them is asked for a decision."""

    def spoil(self, chance: random.Random) -> bytes:
        lines = [spoiled(chance, chance.choice(LINES), JSON_TEXT) for _ in range(1)]
        return b"\n".join(line.replace(b"\n", b" ") for line in lines)

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        """After a whole line, and before another."""
        del folder
        workers = chance.choice((1, 2))
        allocation = on_nodes({"0": workers})
        trial = Trial("accuracy", 20) if chance.random() < 0.5 else None
        setup = CommandSetup("a", allocation, BatchChoice(16), trial)
        events = self._started(setup)
        progress, mark = Progress(), EpochMark()
        shown = []
        for number, line in enumerate([LINES[0].encode(), data, LINES[1].encode(), LINES[2].encode()]):
            found = read_report(line, setup, progress, t_s=float(number + 1), mark=mark)
            mark = found.mark
            shown += [*found.problems, found.wrong]
            assert all(len(one) <= LONGEST_SENTENCE for one in shown), "a problem is too long to be read"
            if found.report is not None:
                assert decode(found.report.kind, encode(found.report)) == found.report
                shown.append(encode(found.report))
                progress = progress.after(found.report)
                events.append(found.report)
        state = RunState()
        for event in events:
            state.apply(event)
        policy = make_policy(chance.choice(("pollux", "optimus", "tiresias")))
        with one_blas_thread():
            policy.decide(state.view(10.0), None, child_rng(0, "fuzz"))
        history_of(events)
        shown += [f"{line.what} {line.text}" for line in job_lines(events, "a")]
        return "\n".join(shown)

    def _started(self, setup: CommandSetup) -> list[Event]:
        job = _job_of("a", Tier.ADAPTIVE)
        start = Instruction(1, Action.START, "a", setup.allocation, setup.batch)
        return [
            RunStarted(t_s=0.0, identity={"policy": "pollux"}, nodes=gpu_nodes(1, 4)),
            JobSubmitted(t_s=0.0, job=job),
            Decided(t_s=0.0, policy="pollux", instructions=(start,), reasons={}, memory=None),
        ]

    def command(self, data: bytes, folder: Path) -> list[str]:
        """A job that prints the line, and whole ones around it."""
        lines = [LINES[0].encode(), data, LINES[1].encode(), b'{"epoch": 4, "loss": 0.1}']
        (folder / "lines").write_bytes(b"\n".join(lines) + b"\n")
        (folder / "jobs.toml").write_text(
            '[[job]]\nname = "a"\nepochs = 4\ncommand = ["cat", "lines"]\n', encoding="utf-8"
        )
        return ["run", "jobs.toml", "--slots", "1", "--yes"]


def chance_rng(chance: random.Random) -> Any:
    return child_rng(chance.randrange(2**31), "fuzz")


def _journaled(job: Job) -> str:
    event = JobSubmitted(t_s=0.0, job=job)
    text = encode(event)
    assert decode(event.kind, text) == event
    return text


# Our own files


class Metas:
    """The newest of two checkpoints has a damaged meta.json: the older one is used, and that is said."""

    def spoil(self, chance: random.Random) -> bytes:
        whole = (_checkpoints() / "00000002" / META_FILE).read_bytes()
        if chance.random() < 0.5:
            return spoiled(chance, whole.decode(), JSON_TEXT)
        return spoiled_bytes(chance, whole)

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        del chance
        place = folder / "checkpoints"
        shutil.copytree(_checkpoints(), place)
        try:
            (place / "00000002" / META_FILE).write_bytes(data)
            best = newest_best(place)
            notes: list[str] = []
            store = CheckpointStore(place, keep=2, note=notes.append)
            try:
                loaded = store.load()
            finally:
                store.close()
            assert loaded is not None, "the older checkpoint is not used"
            value = float(loaded.state["value"])
            assert (loaded.progress, value) in {(1.0, 1.0), (2.0, 2.0)}, f"{loaded.progress} of {value}"
            assert value == 2.0 or notes, "nothing is said of the damage"
            assert best is not None, "the best checkpoint is lost"
            assert best.progress == (2.0 if value == 2.0 else 1.0), f"best {best}, loaded {value}"
            for note in notes:
                assert not wrong_with_sentence(note), wrong_with_sentence(note)
            return "\n".join(notes)
        finally:
            shutil.rmtree(place)

    def command(self, data: bytes, folder: Path) -> list[str]:
        shutil.copytree(_runs() / "study", folder / "run")
        place = folder / "run" / "jobs" / "trial-000" / "checkpoints"
        shutil.copytree(_checkpoints(), place)
        (place / "00000002" / META_FILE).write_bytes(data)
        return ["report", str(folder / "run")]


@cache
def _checkpoints() -> Path:
    """Two, both whole and both a best one."""
    folder = Path(_place()) / "checkpoints"
    store = CheckpointStore(folder, keep=2, note=print)
    for number in (1.0, 2.0):
        assert store.save({"value": torch.tensor(number)}, progress=number, best=True, wait=True)
    store.close()
    assert len(whole_checkpoints(folder)) == 2
    return folder


@cache
def _place() -> str:
    place = tempfile.TemporaryDirectory(prefix="stretto-fuzz-")
    _KEPT.append(place)
    return place.name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed with this process."""


@cache
def _runs() -> Path:
    """A run of jobs and one of a study, both over."""
    place = Path(_place())
    report = 'for i in 1 2 3 4; do echo "{\\"epoch\\": $i, \\"loss\\": 0.$i}"; done'
    (place / "print.sh").write_text(report, encoding="utf-8")
    (place / "jobs.toml").write_text(
        "".join(f'[[job]]\nname = "j{i}"\nepochs = 4\ncommand = ["sh", "print.sh"]\n' for i in range(3)),
        encoding="utf-8",
    )
    (place / "study.toml").write_text(
        '[study]\nname = "study"\nmetric = "loss"\ndirection = "min"\ntrials = 3\n'
        'command = ["sh", "print.sh"]\n[halving]\nrungs = [1, 2]\neta = 2\nmax_epochs = 4\n'
        "[space]\nlr = { log = [1e-4, 1.0] }\n[profile]\nepoch_s = 0.1\n"
        'speedup = { "1" = 1.0 }\n[machine]\nslots = 2\n',
        encoding="utf-8",
    )
    for arguments in (["run", "jobs.toml"], ["tune", "study.toml", "--deadline", "60s"]):
        command = [sys.executable, "-c", CALL, *arguments, "--slots", "2"]
        done = subprocess.run(command, cwd=place, capture_output=True, check=False, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
    return place / "runs"


class RunFiles:
    """One file of a run that is over, damaged; `report` and `explain` read it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def spoil(self, chance: random.Random) -> bytes:
        """With the run and the name of the file in a first line."""
        run = chance.choice(("jobs", "study"))
        there = [name for name in self._names if (_runs() / run / name).exists()]
        name = chance.choice(there)
        whole = (_runs() / run / name).read_bytes()
        if name.endswith(".sqlite"):
            data = self._in_use(chance, whole)
        elif chance.random() < 0.6:
            data = spoiled(chance, whole.decode(), JSON_TEXT)
        else:
            data = spoiled_bytes(chance, whole)
        return f"{run} {name}\n".encode() + data

    def _in_use(self, chance: random.Random, whole: bytes) -> bytes:
        """Most of a database is empty space, where nothing is to be damaged: aim at what is written."""
        data = whole
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            if chance.random() < 0.2:
                data = spoiled_bytes(chance, data)
                continue
            written = [at for at in chance.choices(range(len(data)), k=50) if data[at]] if data else []
            if written:
                at = written[0]
                new = (
                    data[at] ^ (1 << chance.randrange(8)) if chance.random() < 0.5 else chance.randrange(256)
                )
                data = data[:at] + bytes([new]) + data[at + 1 :]
        return data

    def _laid_out(self, data: bytes, folder: Path) -> Path:
        head, _, content = data.partition(b"\n")
        run, name = head.decode().split()
        place = folder / run
        shutil.copytree(_runs() / run, place)
        (place / name).write_bytes(content)
        return place

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        """Of the two commands one, and of `explain` now and then the story of one job."""
        place = self._laid_out(data, folder)
        job = chance.choice((None, "trial-001" if place.name == "study" else "j1"))
        explains = chance.random() < 0.5
        try:
            shown = _shown_by(lambda: _tell(RunFolder(place), job, explains=explains))
        finally:
            shutil.rmtree(place)
        name = data.partition(b"\n")[0].decode()
        whole = _told_of(place.name, job, explains=explains)
        same = shown.replace(str(folder), "") == whole
        said = "damage" in shown or f"{name.partition(' ')[2]}: " in shown
        if not same and not said and not name.endswith(METRICS):
            command = f"{'explain' if explains else 'report'} {job or ''}"
            raise AssertionError(f"{name} was believed by {command}: {_difference(shown, whole)}")
        return shown

    def command(self, data: bytes, folder: Path) -> list[str]:
        place = self._laid_out(data, folder)
        return ["explain" if len(data) % 2 else "report", str(place), *(["--json"] if len(data) % 3 else [])]


def _difference(shown: str, whole: str) -> str:
    pairs = zip(shown.splitlines(), whole.splitlines(), strict=False)
    return next((f"{now!r} instead of {then!r}" for now, then in pairs if now != then), f"{shown[-300:]!r}")


def _tell(folder: RunFolder, job: str | None, *, explains: bool) -> None:
    if explains:
        explain_command(str(folder.path), job)
    else:
        report_command(str(folder.path))


@cache
def _told_of(run: str, job: str | None, *, explains: bool) -> str:
    folder = _runs() / run
    return _shown_by(lambda: _tell(RunFolder(folder), job, explains=explains)).replace(str(_runs()), "")


class Profiles:
    def spoil(self, chance: random.Random) -> bytes:
        return spoiled(chance, self._whole(), JSON_TEXT)

    @staticmethod
    @cache
    def _whole() -> str:
        path = Path(_place()) / "whole-profile.json"
        write_profile(
            path,
            MeasuredProfile(
                what="train.py:train",
                slots=2,
                measured_s=3.0,
                configs=({"lr": 0.1}, {"lr": 0.2}),
                epochs=tuple(
                    TimedEpoch(config=i % 2, workers=1 + i // 4, epoch_s=1.0 + 0.1 * i, first=i % 3 == 0)
                    for i in range(8)
                ),
                speeds=(SpeedSample(1, 1, 0, 16, 0.1, 0.0), SpeedSample(1, 2, 0, 16, 0.12, 0.01)),
                warm_up_s=2.0,
                starts_s=(0.5, 0.6, 0.4),
                resizes_s=(0.7,),
                examples=1000,
                speed=AllReduceSpeed(0.1, 0.01, 0.5, 0.02, 0.05, 0.005, 1.6),
                not_measured=("nothing",),
            ),
        )
        return path.read_text(encoding="utf-8")

    def read(self, data: bytes, folder: Path, chance: random.Random) -> str:
        path = folder / "profile.json"
        path.write_bytes(data)
        measured = read_profile(path)
        believed = believe(measured, same_machine=chance.random() < 0.5)
        return f"{measured.failure} {measured.speedup(2)} {believed.start_s} {measured.tells_epochs}"

    def command(self, data: bytes, folder: Path) -> list[str]:
        (folder / "profile.json").write_bytes(data)
        head, _, rest = STUDY.partition("[profile]")
        world = "[world]\ncurves" + rest.partition("[world]\ncurves")[2]
        (folder / "study.toml").write_text(f'{head}[profile]\nfile = "profile.json"\n{world}')
        return ["plan", "study.toml", "--set", "rubberband.planner=published"]


SUBJECTS: dict[Kind, tuple[Subject, ...]] = {
    Kind.SNAPSHOT: (Snapshots(),),
    Kind.TOML: (Studies(), Jobs()),
    Kind.CSV: (Tables(), TaskSets()),
    Kind.META: (Metas(),),
    Kind.JOURNAL: (RunFiles(("journal.sqlite",)),),
    Kind.LINES: (Output(),),
    Kind.OTHERS: (
        RunFiles(("spec.json", "result.json", "plan.json")),
        RunFiles((f"jobs/j1/{METRICS}", f"jobs/trial-001/{METRICS}")),
        Profiles(),
    ),
}


def fuzz(
    kind: Kind, number: int, seed: int, *, folder: Path, commands: bool = False
) -> Iterator[tuple[bytes, Tried]]:
    """So many spoilt files of a kind, read one after the other: in this process, or by commands."""
    chance = random.Random(f"{kind}-{seed}-{commands}")
    for turn in range(number):
        subject = SUBJECTS[kind][turn % len(SUBJECTS[kind])]
        data = subject.spoil(chance)
        if commands:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                yield data, try_command(subject, data, Path(place))
        else:
            yield data, try_it(subject, data, folder, chance)
