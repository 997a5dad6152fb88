"""Reads a file of jobs: what each job trains, for how many epochs, and on how many GPUs."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.core.job import BatchLimits, Job, Role, Tier, Value, Work
from stretto.core.resources import Resources
from stretto.core.units import counted, parse_duration_s
from stretto.inputs.cluster import MACHINE_KEYS, MOST_SLOTS, MachineSpec, machine_of
from stretto.inputs.fields import NAME_RULE, Fields, is_folder_name
from stretto.inputs.study import parse_toml, read_text
from stretto.inputs.study_section import MOST_EPOCHS
from stretto.inputs.work import RealWork, check_command, find_entry, in_own_folder
from stretto.search.source import ANY_BATCH
from stretto.wire.messages import Described

SECTIONS = ("job", "machine")
JOB_KEYS = ("name", "entry", "command", "epochs", "gpus", "batch", "tier", "submit_at", "config", "in_folder")
BATCH_KEYS = ("initial", "max", "per_gpu", "accumulation")
MOST_BATCH = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The batch sizes in the file; None: the training code decides."""

    initial: int | None = None
    max: int | None = None
    per_gpu: tuple[int, int] | None = None
    accumulation: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job as it is written in the file."""

    name: str
    work: RealWork
    epochs: int
    min_workers: int
    max_workers: int | None
    """None: all slots."""
    batch: BatchSpec
    tier: Tier | None
    """None: adaptive if the training code is, else elastic; a command is rigid."""
    submit_s: float
    config: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsFile:
    """Everything a file of jobs says."""

    jobs: tuple[JobSpec, ...]
    machine: MachineSpec
    tables: dict[str, Any]
    path: Path


def read_jobs(path: Path | str) -> JobsFile:
    """Reads the jobs of a TOML file; an InputError names the place, value, rule and remedy."""
    path = Path(path)
    return jobs_of(parse_toml(read_text(path, "jobs"), path, "jobs"), path)


def jobs_of(tables: dict[str, Any], path: Path) -> JobsFile:
    """Reads the jobs of a parsed file."""
    if "study" in tables and "job" not in tables:
        raise InputError(
            "is a study, not a file of jobs.",
            where=str(path),
            remedy=f"`stretto tune {path}` trains its trials.",
        )
    sections = Fields(tables, SECTIONS, file=str(path), name="")
    written = sections.list("job", [], of=dict, rule="written as [[job]]")
    if not written:
        raise InputError("has no jobs.", where=str(path), remedy="Write one or more [[job]] sections.")
    jobs = [
        _job(Fields(table, JOB_KEYS, file=str(path), name=f"job[{index}]"), path)
        for index, table in enumerate(written)
    ]
    names = set[str]()
    for index, job in enumerate(jobs):
        if job.name in names:
            raise InputError(
                f"{job.name!r} is there twice.", where=f"{path}: job[{index}].name", remedy="Rename one."
            )
        names.add(job.name)
    return JobsFile(
        jobs=tuple(jobs),
        machine=machine_of(sections.table("machine", MACHINE_KEYS, {})),
        tables=tables,
        path=path,
    )


def complete(spec: JobSpec, described: Described | None, slots: int) -> Job:
    """The whole job: what the file leaves out comes from the training code."""
    batch = _limits(spec, described)
    tier = spec.tier or (Tier.RIGID if described is None else _tier(described))
    if tier is Tier.ADAPTIVE and described is not None and not described.adaptive:
        raise InputError(
            "tier is adaptive, and the training code keeps its batch size.",
            where=f"job {spec.name}",
            remedy="Call run.prepare(..., adaptive=True), or set tier to elastic.",
        )
    most = slots if spec.max_workers is None else min(spec.max_workers, slots)
    if spec.min_workers > slots:
        raise InputError(
            f"it needs at least {counted(spec.min_workers, 'slot')}, and there are {slots}.",
            where=f"job {spec.name}",
            remedy="Lower gpus.min, or give more --slots.",
        )
    requested = most if tier is Tier.RIGID and spec.max_workers is not None else spec.min_workers
    units = 1.0 if described is None else max(described.examples / batch.initial, 1.0)
    return Job(
        id=spec.name,
        application=str(spec.work),
        submit_s=spec.submit_s,
        worker=Role(demand=Resources(gpu=1), requested=requested, min=spec.min_workers, max=most),
        tier=tier,
        batch=batch,
        work=Work(units_per_epoch=units, epochs=spec.epochs),
        config=spec.config,
    )


def _tier(described: Described) -> Tier:
    return Tier.ADAPTIVE if described.adaptive else Tier.ELASTIC


def _limits(spec: JobSpec, described: Described | None) -> BatchLimits:
    """The bounds of the file, or else those of the training code."""
    said = spec.batch
    if described is None:
        if said.initial is None:
            return ANY_BATCH
        low, high = said.per_gpu or (1, said.max or said.initial)
        return BatchLimits(
            initial=said.initial,
            requested=said.initial,
            max=said.max or said.initial,
            per_gpu_min=low,
            per_gpu_max=high,
            accumulation=bool(said.accumulation),
        )
    _check_bounds(spec, described)
    low, high = said.per_gpu or (described.per_worker_min, described.per_worker_max)
    return BatchLimits(
        initial=described.batch,
        requested=described.batch,
        max=said.max or described.max_batch,
        per_gpu_min=low,
        per_gpu_max=high,
        accumulation=described.accumulation if said.accumulation is None else said.accumulation,
    )


def _check_bounds(spec: JobSpec, described: Described) -> None:
    """The file may only narrow the bounds of the training code; anything else is an InputError."""
    said, place = spec.batch, f"job {spec.name}: batch"
    if said.initial not in {None, described.batch}:
        raise InputError(
            f"initial is {said.initial}, and the training code has a batch size of {described.batch}, which "
            f"its learning rate is made for.",
            where=place,
            remedy="Leave it out, or change the code's.",
        )
    if said.max is not None and not described.batch <= said.max <= described.max_batch:
        raise InputError(
            f"max is {said.max}, and the training code allows {described.batch} to {described.max_batch}.",
            where=place,
            remedy="Stay within that, or change batch_size or max_batch_size in the code.",
        )
    least, most = described.per_worker_min, described.per_worker_max
    if said.per_gpu is not None and not least <= said.per_gpu[0] <= said.per_gpu[1] <= most:
        raise InputError(
            f"per_gpu is {list(said.per_gpu)}, and the training code allows {least} to {most}.",
            where=place,
            remedy="Stay within that, or change per_worker_batch in the code.",
        )
    if said.accumulation and not described.accumulation:
        raise InputError(
            "accumulation is true, and the training code says accumulate=False.",
            where=place,
            remedy="Change one of them.",
        )


def _job(fields: Fields, path: Path) -> JobSpec:
    name = fields.text("name")
    if not is_folder_name(name):
        raise fields.wrong("name", f"a name for a job: {NAME_RULE}", "Give a shorter one without slashes.")
    config = _config(fields)
    gpus = fields.table("gpus", ("min", "max"), {})
    least = gpus.whole("min", 1, at_most=MOST_SLOTS)
    tier = fields.choice("tier", tuple(Tier)) if "tier" in fields else None
    return JobSpec(
        name=name,
        work=_work(fields, path, config),
        epochs=fields.whole("epochs", at_most=MOST_EPOCHS),
        min_workers=least,
        max_workers=gpus.whole("max", at_least=least, at_most=MOST_SLOTS) if "max" in gpus else None,
        batch=_batch(fields.table("batch", BATCH_KEYS, {})),
        tier=None if tier is None else Tier(tier),
        submit_s=_submit_s(fields),
        config=config,
    )


def _work(fields: Fields, path: Path, config: tuple[tuple[str, Value], ...]) -> RealWork:
    if ("entry" in fields) == ("command" in fields):
        raise InputError(
            "it takes entry or command, one of the two.",
            where=fields.where("entry"),
            remedy='Write entry = "train.py:train", or command = ["python", "train.py"].',
        )
    in_folder = fields.flag("in_folder", default=False)
    if "entry" in fields:
        entry = find_entry(fields.text("entry"), path.parent, where=fields.where("entry"))
        return in_own_folder(entry, asked=in_folder, where=fields.where("in_folder"))
    argv = fields.list("command", of=str, rule='a list such as ["python", "train.py"]')
    names = [name for name, _ in config]
    command = check_command(argv, names, where=fields.where("command"), folder=path.parent)
    return in_own_folder(command, asked=in_folder)


def _batch(fields: Fields) -> BatchSpec:
    initial = fields.whole("initial", at_most=MOST_BATCH) if "initial" in fields else None
    most = fields.whole("max", at_least=initial or 1, at_most=MOST_BATCH) if "max" in fields else None
    per_gpu = fields.list("per_gpu", [], of=int, rule="a list of the least and the most, such as [4, 12]")
    if "per_gpu" in fields and not (len(per_gpu) == 2 and 1 <= per_gpu[0] <= per_gpu[1] <= MOST_BATCH):
        raise fields.wrong("per_gpu", "a list of the least and the most, such as [4, 12]")
    accumulation = fields.raw("accumulation", None)
    if accumulation is not None and not isinstance(accumulation, bool):
        raise fields.wrong("accumulation", "true or false")
    return BatchSpec(
        initial=initial,
        max=most,
        per_gpu=(per_gpu[0], per_gpu[1]) if per_gpu else None,
        accumulation=accumulation,
    )


def _submit_s(fields: Fields) -> float:
    """Seconds after the start of the run; 0 is allowed."""
    value = fields.raw("submit_at", 0)
    if isinstance(value, str):
        return parse_duration_s(value, where=fields.where("submit_at"))
    return fields.number("submit_at", 0.0)


def _config(fields: Fields) -> tuple[tuple[str, Value], ...]:
    table = fields.raw("config", {})
    if not isinstance(table, dict):
        raise fields.wrong("config", "a table of names and values")
    for name, value in table.items():
        if not isinstance(value, bool | int | float | str):
            raise InputError(
                f"{name} is {reprlib.repr(value)}.",
                where=fields.where("config"),
                remedy="Values are numbers, texts, true and false.",
            )
    return tuple(table.items())


EXAMPLE_JOBS = """\
# Jobs that share a machine. Run them: stretto run jobs.toml --policy pollux; on a Ray cluster, add --on ray

[machine]
# slots = 2                  # workers at once; left out: one for every GPU, or else for every core
usd_per_slot_hour = 0        # what a slot costs you

[[job]]
name = "small"               # its files go to runs/jobs/jobs/small
entry = "train.py:train"     # def train(config, run), in this folder
epochs = 10                  # train no further than this
config = { lr = 0.1, width = 64 }   # what train is given

[[job]]
name = "large"
entry = "train.py:train"     # or command = ["python", "train.py", "--lr", "{lr}"]
epochs = 30
submit_at = "30s"            # when it is submitted, after the run's start; at once if left out
gpus = { min = 1, max = 2 }  # number of workers; 1 to all slots if left out
tier = "adaptive"            # the policy may change workers and batch; "elastic": workers; "rigid": nothing
batch = { max = 1024, per_gpu = [16, 256] }   # within the limits of the training code, which are the default
config = { lr = 0.1, width = 256 }   # its own values
"""
