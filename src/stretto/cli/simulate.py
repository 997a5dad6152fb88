"""`stretto simulate`: workloads, a study or a real run under several policies, side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stretto.cli.bars import progress_bar
from stretto.cli.flags import AsJson, ReportFile, Seed, check_report
from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s
from stretto.policies.registry import check_policies, check_targets, parse_options
from stretto.report.tables import metrics_table, metrics_text
from stretto.runs.folder import find_run
from stretto.simulation.jobs import Run, Setup
from stretto.simulation.jobs import simulate as run_simulation
from stretto.simulation.workloads import Request, load_workloads
from stretto.system.plain_json import json_data

DEFAULT_POLICIES = "pollux,optimus,tiresias"
FLAGS = {"workload": "WORKLOAD", "option": "--set", "as_json": "--json"}
"""Parameters whose flag has another name."""
TUNING_POLICIES = "hypersched,asha,sha,hyperband,rubberband"
TABLE_WIDTH = 90
"""On a narrower terminal the table would lose columns; the text to paste only wraps."""


STUDY_FLAGS = {"study", "policy", "deadline", "budget", "seeds", "option", "seed", "as_json", "report"}
"""What `--study` goes with."""
REPLAY_FLAGS = {"replay", "policy", "option", "as_json"}
"""What `--replay` goes with."""
PARTS = {
    "--replay": "stretto.cli.replay",
    "--study": "stretto.cli.study",
    "--report": "stretto.report.jobs_page",
}
"""Modules that are imported for these flags only."""


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
        typer.Option(metavar="WHEN", help="End the study then, not as it says.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="USD", help="End it at this cost; none: at no cost.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Simulations of the study.")] = 1,
    profiles: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of profiles; may be repeated.", show_default="built-in models"),
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="Take the profiles of this GPU type.", show_default=False)
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
        _part("--replay").compare_replay(folder, policies, options, as_json=as_json)
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
    request = Request(
        sources=tuple(workload or ["builtin:demo"]),
        profiles=tuple(profiles or ()),
        gpu_type=gpu_type,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        jobs=jobs,
        hours=hours,
        log_start_s=None if log_start is None else parse_duration_s(log_start, where="--log-start"),
        seed=seed,
    )
    loaded = load_workloads(request)
    setup = Setup(
        interval_s=_at_least_a_second(parse_duration_s(interval, where="--interval"), "--interval"),
        rounds=rounds,
        whole_seconds=whole_seconds,
        restart_s=parse_duration_s(restart, where="--restart"),
        interference=_share(interference, "--interference"),
        noise=_share(noise, "--noise"),
        priors=priors,
        seed=seed,
    )
    runs: list[Run] = []
    for one in loaded:
        for note in one.workload.notes:
            print(f"{one.workload.name}: {note}", file=sys.stderr)
        for name in policies:
            cluster = dataclasses.replace(setup, nodes=one.nodes)
            try:
                with progress_bar(f"{name} on {one.workload.name}", len(one.workload.jobs)) as tick:
                    run = run_simulation(one.workload, name, cluster, options=options.get(name), on_tick=tick)
            except InputError as error:
                _show(runs, as_json=as_json)
                where = f"{name} on {one.workload.name}"
                raise InputError(error.problem, where=where, remedy=error.remedy) from error
            runs.append(run)
    _show(runs, as_json=as_json)
    if report is not None:
        _part("--report").write_report(report, runs)
        print(f"report: {report}", file=sys.stderr)
    if any(run.metrics.completed < run.metrics.jobs for run in runs):
        raise typer.Exit(1)


def _part(flag: str) -> Any:
    return import_module(PARTS[flag])


def _show(runs: list[Run], *, as_json: bool) -> None:
    metrics = [run.metrics for run in runs]
    if not metrics:
        return
    if as_json:
        found = json_data({"runs": [dataclasses.asdict(one) for one in metrics]})
        print(json.dumps(found, indent=2, allow_nan=False))
    elif sys.stdout is not None and sys.stdout.isatty() and Console().width >= TABLE_WIDTH:
        Console().print(metrics_table(metrics))
    else:
        print(metrics_text(metrics))


def _check_study_flags(context: typer.Context) -> None:
    for name in _given(context):
        if name not in STUDY_FLAGS:
            raise InputError(
                f"{_flag(name)} is about a workload, and --study simulates a study.",
                remedy="Leave one of them out; a study's cluster and speeds are in its file.",
            )


def _check_replay_flags(context: typer.Context) -> None:
    for name in _given(context):
        if name not in REPLAY_FLAGS:
            raise InputError(
                f"{_flag(name)} changes what --replay takes from the run.",
                remedy=f"Beside it there are {', '.join(sorted(map(_flag, REPLAY_FLAGS - {'replay'})))}.",
            )


def _check_workload_flags(context: typer.Context) -> None:
    for name in _given(context):
        if name in {"deadline", "budget", "seeds"}:
            raise InputError(f"{_flag(name)} is about a study.", remedy="Add --study STUDY.toml.")


def _given(context: typer.Context) -> list[str]:
    """Parameters that stand on the command line."""
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
