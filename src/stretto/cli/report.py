"""`stretto report`: the result of a run, also as a page."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from stretto.cli.flags import AsJson, ReportFile, check_report
from stretto.cli.runs import show_runs
from stretto.core.errors import InputError
from stretto.report.run_page import write_run_page
from stretto.report.run_text import jobs_text, tune_text
from stretto.runs.folder import RUNS, RunFolder, find_run
from stretto.runs.job_results import run_result
from stretto.runs.results import tune_result
from stretto.runs.status import ending_of


def report(
    run: Annotated[
        str | None, typer.Argument(help="A run under ./runs, or its folder.", show_default="lists the runs")
    ] = None,
    as_json: AsJson = False,
    report: ReportFile = None,
) -> None:
    """Print the result of a run, or its progress while it is live; without a name, list the runs.

    Restarts are starts and resizes after the first start, retries are restarts after a failure.

    Example: [bold]stretto report resnet-cifar --report run.html[/bold]
    """
    check_report(report)
    if run is None:
        if report is not None:
            raise InputError("--report needs a run.", remedy="Name one; `stretto runs` lists them.")
        show_runs(RUNS, as_json=as_json)
        return
    folder = find_run(run)
    damage = folder.damage()
    if damage:
        print(damage, file=sys.stderr)
    text, plain = _summary(folder)
    plain |= {"damage": damage} if damage else {}
    print(json.dumps(plain, indent=2, allow_nan=False) + "\n" if as_json else text, end="")
    if report is not None:
        write_run_page(report, folder)
        print(f"report: {report}", file=sys.stderr)


def _summary(folder: RunFolder) -> tuple[str, dict[str, Any]]:
    """The result as text and as JSON data."""
    spec, ended_by = folder.begun_spec(), ending_of(folder)
    if (study := spec.study) is not None:
        result = tune_result(folder, ended_by)
        return tune_text(result, study), result.as_dict()
    jobs = run_result(folder, ended_by)
    return jobs_text(jobs), jobs.as_dict()
