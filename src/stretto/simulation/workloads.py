"""Workloads by name or file, with a cluster to run them on; and jobs made in Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.core.cluster import Node, gpu_nodes
from stretto.core.errors import InputError
from stretto.core.job import Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.core.seeds import child_rng
from stretto.inputs.arguments import given_choice, given_text, given_whole
from stretto.planning.profile import Scaling
from stretto.search.source import ANY_BATCH
from stretto.worlds.applications import Applications, Configuration, builtin_catalogue
from stretto.worlds.measured import load_profiles
from stretto.worlds.servers import server_nodes, server_workload
from stretto.worlds.synthetic import TimedTruth, demo_workload, synthetic_workload
from stretto.worlds.truth import SimulatedJob, Workload
from stretto.worlds.workload_files import LogFilter, load_workload

BUILTIN = "builtin:"
MOST_GPUS = ANY_BATCH.max
"""GPUs of a job made in Python: its batch must have an example for each."""
LARGEST = 100_000
"""Most nodes, GPUs per node, jobs or hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Which workloads to load, and for which cluster."""

    sources: tuple[str, ...]
    """Files, or builtin:demo, builtin:synthetic, builtin:servers."""
    profiles: tuple[Path, ...] = ()
    gpu_type: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    jobs: int | None = None
    hours: float | None = None
    log_start_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadedWorkload:
    workload: Workload
    nodes: tuple[Node, ...]


def load_workloads(request: Request) -> list[LoadedWorkload]:
    """Loads every source of the request; InputError for the first that is wrong."""
    _check(request)
    applications = _applications(request)
    loaded = [_load(source, request, applications) for source in request.sources]
    names = [one.workload.name for one in loaded]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"workload {name} is given twice.", remedy="Name every workload once.")
    return loaded


def _check(request: Request) -> None:
    for flag, value in (
        ("--nodes", request.nodes),
        ("--gpus-per-node", request.gpus_per_node),
        ("--jobs", request.jobs),
        ("--hours", request.hours),
    ):
        if value is not None and not 0 < value <= LARGEST:
            raise InputError(
                f"{flag} {value:g} is out of range.", remedy=f"Give more than 0, at most {LARGEST}."
            )
    if request.gpu_type is not None and not request.profiles:
        raise InputError(
            "--gpu-type chooses among profiles, and none are given.", remedy="Add --profiles FOLDER."
        )


def _applications(request: Request) -> Applications:
    if request.profiles:
        return load_profiles(request.profiles, request.gpu_type)
    return builtin_catalogue()


def _load(source: str, request: Request, applications: Applications) -> LoadedWorkload:
    rng = child_rng(request.seed, "workload", Path(source).name)
    nodes = gpu_nodes(request.nodes or 16, request.gpus_per_node or 4)
    if not source.startswith(BUILTIN):
        return LoadedWorkload(load_workload(Path(source), applications, rng, keep=_filter(request)), nodes)
    name = source.removeprefix(BUILTIN)
    if request.log_start_s is not None:
        raise InputError(f"--log-start is for logs, and {source} is none.", remedy="Leave it out.")
    if name != "synthetic" and request.profiles:
        raise InputError(f"{source} has models of its own.", remedy="Leave --profiles out.")
    if name == "demo":
        if request.jobs is not None or request.hours is not None:
            raise InputError(
                "builtin:demo has a fixed size.", remedy="Use builtin:synthetic with --jobs and --hours."
            )
        return LoadedWorkload(demo_workload(), gpu_nodes(request.nodes or 4, request.gpus_per_node or 4))
    if name == "synthetic":
        workload = synthetic_workload(
            rng, jobs=request.jobs or 160, hours=request.hours or 8.0, applications=applications
        )
        return LoadedWorkload(workload, nodes)
    if name == "servers":
        if request.gpus_per_node is not None:
            raise InputError("nodes of builtin:servers have 2 GPUs.", remedy="Leave --gpus-per-node out.")
        slots = 20 if request.hours is None else max(1, round(request.hours * 6))
        workload = server_workload(rng, jobs=request.jobs or 60, slots=slots)
        return LoadedWorkload(workload, server_nodes(request.nodes or 13))
    raise InputError(
        f"there is no workload {source!r}.",
        remedy="There are builtin:demo, builtin:synthetic, builtin:servers.",
    )


def _filter(request: Request) -> LogFilter | None:
    if request.jobs is None and request.hours is None and request.log_start_s is None:
        return None
    return LogFilter(
        start_s=request.log_start_s or 0.0,
        hours=math.inf if request.hours is None else request.hours,
        max_jobs=request.jobs,
    )


def catalogue_job(
    name: str,
    application: str,
    *,
    gpus: int = 1,
    batch: int | None = None,
    tier: str = Tier.ADAPTIVE,
    submit_s: float = 0.0,
) -> SimulatedJob:
    """A job of the built-in catalogue: bert, cifar10, deepspeech2, imagenet, ncf or yolov3.

    `gpus` and `batch` are what its owner requests; the batch is the total of a step, by default the smallest
    that is possible. `tier` says what a policy may change: `rigid` nothing, `elastic` the number of GPUs,
    `adaptive` the batch size, too.
    """
    where = _place(name)
    chosen = builtin_catalogue().get(given_text(application, f"{where}: application", "bert"), where=where)
    tier = Tier(given_choice(tier, tuple(Tier), "tier"))
    workers = _count(gpus, f"{where}: gpus")
    least = max(chosen.initial_batch, workers * chosen.per_gpu_min)
    request = Configuration(workers, least if batch is None else _count(batch, f"{where}: batch"))
    submitted_s = _number(submit_s, f"{where}: submit_s")
    job = replace(chosen, tier=tier).job(name, submitted_s, request, where=where)
    return SimulatedJob(job, chosen.truth)


def own_job(
    name: str,
    *,
    epochs: int,
    epoch_s: float,
    gpus: int = 1,
    max_gpus: int | None = None,
    speedup: Mapping[int, float] | None = None,
    submit_s: float = 0.0,
) -> SimulatedJob:
    """A job of your own: `epochs` epochs, each of `epoch_s` seconds on one GPU.

    It requests `gpus` and keeps them; with `max_gpus` it is elastic and runs on 1 to `max_gpus` GPUs.
    `speedup` is its speed relative to one GPU, such as {1: 1.0, 2: 1.9, 4: 3.5}; without it, it is linear.
    Between two points it is interpolated, and beyond the last one nothing is gained.
    """
    where = _place(name)
    requested = _count(gpus, f"{where}: gpus", MOST_GPUS)
    most = requested if max_gpus is None else _count(max_gpus, f"{where}: max_gpus", MOST_GPUS)
    if most < requested:
        raise InputError(
            f"{requested} GPUs are requested, and max_gpus is {most}.",
            where=where,
            remedy="Raise max_gpus or lower gpus.",
        )
    count = _count(epochs, f"{where}: epochs")
    truth = TimedTruth(count, _number(epoch_s, f"{where}: epoch_s", above_0=True), _scaling(speedup, where))
    job = Job(
        id=name,
        application=name,
        submit_s=_number(submit_s, f"{where}: submit_s"),
        tier=Tier.RIGID if max_gpus is None else Tier.ELASTIC,
        worker=Role(
            demand=Resources(gpu=1), requested=requested, min=requested if max_gpus is None else 1, max=most
        ),
        batch=ANY_BATCH,
        work=Work(units_per_epoch=1.0, epochs=count),
    )
    return SimulatedJob(job, truth)


def _place(name: str) -> str:
    return f"job {given_text(name, 'name', 'bert-1')!r}"


def _count(value: object, where: str, most: int = LARGEST) -> int:
    count = given_whole(value, where)
    if not 1 <= count <= most:
        raise InputError(
            f"{count} is out of range.", where=where, remedy=f"Give a whole number from 1 to {most}."
        )
    return count


def _number(value: object, where: str, *, above_0: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if not good or (above_0 and not value):
        rule = "a number above 0" if above_0 else "a number, 0 or more"
        raise InputError(f"{value!r} is not {rule}.", where=where, remedy="Give seconds: 60 is a minute.")
    return float(value)  # type: ignore[arg-type]


def _scaling(speedup: object, where: str) -> Scaling:
    if speedup is None:
        return Scaling(((1, 1.0), (MOST_GPUS, float(MOST_GPUS))))
    where = f"{where}: speedup"
    if not isinstance(speedup, Mapping) or speedup.get(1) != 1:
        raise InputError(
            f"{speedup!r} does not start from one GPU at speed 1.",
            where=where,
            remedy="Give a dict such as {1: 1.0, 2: 1.9, 4: 3.5}.",
        )
    points = [(_count(gpus, where), _number(speed, where, above_0=True)) for gpus, speed in speedup.items()]
    return Scaling(tuple(sorted(points)))
