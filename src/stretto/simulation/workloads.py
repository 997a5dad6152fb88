"""From what a user names to workloads with a cluster to run them on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from stretto.core.cluster import Node, gpu_nodes
from stretto.core.errors import InputError
from stretto.core.seeds import child_rng
from stretto.worlds.applications import Applications, builtin_catalogue
from stretto.worlds.measured import load_profiles
from stretto.worlds.servers import server_nodes, server_workload
from stretto.worlds.synthetic import demo_workload, synthetic_workload
from stretto.worlds.truth import Workload
from stretto.worlds.workload_files import LogFilter, load_workload

BUILTIN = "builtin:"
LARGEST = 100_000
"""More nodes, GPUs a node, jobs or hours than this are a slip of the finger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Which workloads on which cluster."""

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
class Loaded:
    workload: Workload
    nodes: tuple[Node, ...]


def load_workloads(request: Request) -> list[Loaded]:
    """Every source of the request; InputError for the first that is wrong."""
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


def _load(source: str, request: Request, applications: Applications) -> Loaded:
    rng = child_rng(request.seed, "workload", Path(source).name)
    nodes = gpu_nodes(request.nodes or 16, request.gpus_per_node or 4)
    if not source.startswith(BUILTIN):
        return Loaded(load_workload(Path(source), applications, rng, keep=_filter(request)), nodes)
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
        return Loaded(demo_workload(), gpu_nodes(request.nodes or 4, request.gpus_per_node or 4))
    if name == "synthetic":
        workload = synthetic_workload(
            rng, jobs=request.jobs or 160, hours=request.hours or 8.0, applications=applications
        )
        return Loaded(workload, nodes)
    if name == "servers":
        if request.gpus_per_node is not None:
            raise InputError("nodes of builtin:servers have 2 GPUs.", remedy="Leave --gpus-per-node out.")
        slots = 20 if request.hours is None else max(1, round(request.hours * 6))
        workload = server_workload(rng, jobs=request.jobs or 60, slots=slots)
        return Loaded(workload, server_nodes(request.nodes or 13))
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
