"""`stretto simulate WORKLOAD`: workloads under several policies, side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import typer
from rich.console import Console

from stretto.cli.bars import progress_bar
from stretto.core.errors import InputError, PolicyError
from stretto.policies.registry import Options
from stretto.report.tables import metrics_table, metrics_text, unfinished_note
from stretto.simulation.jobs import Setup, SimulationResult, simulate
from stretto.simulation.workloads import Request, load_workloads
from stretto.system.plain_json import json_data

TABLE_WIDTH = 90
"""A narrower terminal gets the Markdown table, which wraps, instead of one that loses columns."""


def compare_workloads(
    request: Request,
    setup: Setup,
    policies: Sequence[str],
    options: Options,
    *,
    as_json: bool,
    report: Path | None,
) -> None:
    """Simulate the workloads under every policy, and print the metrics."""
    runs: list[SimulationResult] = []
    for one in load_workloads(request):
        for note in one.workload.notes:
            print(f"{one.workload.name}: {note}", file=sys.stderr)
        for name in policies:
            cluster = dataclasses.replace(setup, nodes=one.nodes)
            try:
                with progress_bar(f"{name} on {one.workload.name}", len(one.workload.jobs)) as tick:
                    run = simulate(one.workload, name, cluster, options=options.get(name), on_tick=tick)
            except InputError as error:
                _show(runs, as_json=as_json)
                where = f"{name} on {one.workload.name}"
                raise InputError(error.problem, where=where, remedy=error.remedy) from error
            except PolicyError:
                _show(runs, as_json=as_json)
                raise
            runs.append(run)
    _show(runs, as_json=as_json)
    for run in runs:
        if note := unfinished_note(run):
            print(note, file=sys.stderr)
    if report is not None:
        import_module("stretto.report.jobs_page").write_report(report, runs)
        print(f"report: {report}", file=sys.stderr)
    if any(run.metrics.completed < run.metrics.jobs for run in runs):
        raise typer.Exit(1)


def _show(runs: list[SimulationResult], *, as_json: bool) -> None:
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
