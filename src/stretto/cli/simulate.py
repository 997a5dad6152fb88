"""`stretto simulate`: workloads, a study or a real run under several policies, side by side."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.flags import AsJson, ReportFile, Seed, check_report
from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s
from stretto.policies.registry import check_policies, check_targets, parse_options
from stretto.runs.folder import find_run

DEFAULT_POLICIES = "pollux,optimus,tiresias"
FLAGS = {"workload": "WORKLOAD", "option": "--set", "as_json": "--json"}
"""Parameters whose flag differs from their name."""
TUNING_POLICIES = "hypersched,asha,sha,hyperband,rubberband"


STUDY_FLAGS = {"study", "policy", "deadline", "budget", "seeds", "option", "seed", "as_json", "report"}
"""Parameters that are allowed with `--study`."""
REPLAY_FLAGS = {"replay", "policy", "option", "as_json"}
"""Parameters that are allowed with `--replay`."""
PARTS = {"WORKLOAD": "workloads", "--study": "study", "--replay": "replay", "--replay of jobs": "replay_jobs"}
"""The module of each kind of simulation; it is imported for that kind only."""


def simulate(
    context: typer.Context,
    workload: Annotated[list[str] | None, typer.Argument(help="Workload files.", show_default=False)] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policies, separated by commas.", show_default=DEFAULT_POLICIES),
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Simulate this study instead.", show_default=False)
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Replay this real run instead.", show_default=False),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Use this deadline instead of the study's.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="USD", help="Use this budget instead of the study's; or none.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Simulations of the study.")] = 1,
    profiles: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of profiles; may be repeated.", show_default="built-in models"),
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="Use the profiles of this GPU type.", show_default=False)
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes; builtin:demo has 4, builtin:servers 13.", show_default="16"),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each node.", show_default="4")] = None,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="Time between decisions.")] = "60s",
    restart: Annotated[str, typer.Option(metavar="DURATION", help="Cost of a start or resize.")] = "30s",
    rounds: Annotated[bool, typer.Option("--rounds", help="Decide at the interval only.")] = False,
    whole_seconds: Annotated[
        bool | None,
        typer.Option(help="Round epochs to whole seconds.", show_default="as --rounds"),
    ] = None,
    interference: Annotated[
        float, typer.Option(help="Slowdown of jobs that span nodes and share one, 0 to 1.")
    ] = 0.0,
    noise: Annotated[float, typer.Option(help="Relative error of what jobs measure.")] = 0.0,
    priors: Annotated[
        bool | None,
        typer.Option(help="New jobs learn from finished ones.", show_default="unless --rounds"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Jobs to generate or take from a log.", show_default=False)
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Hours to generate or take from a log.", show_default=False)
    ] = None,
    log_start: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Where in a log to begin.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="POLICY.OPTION=VALUE, such as pollux.p=-1.")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    report: ReportFile = None,
) -> None:
    """Replay workloads under scheduling policies and compare them.

    A workload is a CSV file (name,time,application,num_replicas,batch_size), a condensed Philly log
    (timestamp,duration,num_gpus,gpu_time,cluster), or [bold]builtin:demo[/bold],
    [bold]builtin:synthetic[/bold], [bold]builtin:servers[/bold]; without any it is builtin:demo.
    A study runs under hypersched, asha, sha, hyperband and rubberband unless others are named.

    Example: [bold]stretto simulate jobs.csv --policy pollux,tiresias --report report.html[/bold]
    Example: [bold]stretto simulate --study study.toml --deadline 30m --seeds 20[/bold]
    Example: [bold]stretto simulate --replay digits --policy asha,rubberband[/bold]
    """
    folder = None if replay is None else find_run(replay)
    tunes = study is not None if folder is None else folder.begun_spec().is_study
    usual = TUNING_POLICIES if tunes else DEFAULT_POLICIES
    policies = check_policies(usual if policy is None else policy)
    options = parse_options(option or [])
    check_targets(options, policies)
    check_report(report)
    if folder is not None:
        _check_replay_flags(context)
        if damage := folder.damage():
            print(damage, file=sys.stderr)
        part = _part("--replay" if tunes else "--replay of jobs")
        part.compare_replay(folder, policies, options, as_json=as_json)
        return
    if study is not None:
        _check_study_flags(context)
        part = _part("--study")
        part.compare(
            part.StudyRequest(
                study=study,
                policies=policies,
                deadline=deadline,
                budget=budget,
                seeds=seeds,
                seed=seed,
                options=options,
                as_json=as_json,
                report=report,
            )
        )
        return
    _check_workload_flags(context)
    part = _part("WORKLOAD")
    part.compare_workloads(
        part.Request(
            sources=tuple(workload or ["builtin:demo"]),
            profiles=tuple(profiles or ()),
            gpu_type=gpu_type,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            jobs=jobs,
            hours=hours,
            log_start_s=None if log_start is None else parse_duration_s(log_start, where="--log-start"),
            seed=seed,
        ),
        part.Setup(
            interval_s=_at_least_a_second(parse_duration_s(interval, where="--interval"), "--interval"),
            rounds=rounds,
            whole_seconds=whole_seconds,
            restart_s=parse_duration_s(restart, where="--restart"),
            interference=_share(interference, "--interference"),
            noise=_share(noise, "--noise"),
            priors=priors,
            seed=seed,
        ),
        policies,
        options,
        as_json=as_json,
        report=report,
    )


def _part(kind: str) -> Any:
    return import_module(f"stretto.cli.{PARTS[kind]}")


def _check_study_flags(context: typer.Context) -> None:
    for name in _given(context):
        if name not in STUDY_FLAGS:
            raise InputError(
                f"{_flag(name)} applies to workloads, and --study simulates a study.",
                remedy="Leave one of them out; a study's cluster and speeds are in its file.",
            )


def _check_replay_flags(context: typer.Context) -> None:
    for name in _given(context):
        if name not in REPLAY_FLAGS:
            raise InputError(
                f"{_flag(name)} cannot be combined with --replay, which takes it from the run.",
                remedy=f"Allowed with it: {', '.join(sorted(map(_flag, REPLAY_FLAGS - {'replay'})))}.",
            )


def _check_workload_flags(context: typer.Context) -> None:
    for name in _given(context):
        if name in {"deadline", "budget", "seeds"}:
            raise InputError(f"{_flag(name)} applies to studies.", remedy="Add --study STUDY.toml.")


def _given(context: typer.Context) -> list[str]:
    """The parameters given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _flag(name: str) -> str:
    return FLAGS.get(name) or f"--{name.replace('_', '-')}"


def _at_least_a_second(value: float, flag: str) -> float:
    if value < 1:
        raise InputError(f"{flag} {value:g} must be at least a second.", remedy="Give a duration like 60s.")
    return value


def _share(value: float, flag: str) -> float:
    if not 0.0 <= value < 1.0:
        raise InputError(f"{flag} {value:g} must be at least 0 and below 1.", remedy="Give a share: 0.25.")
    return value
