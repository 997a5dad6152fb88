"""`stretto plan`: predicts what a study costs and when it is done; nothing is spent."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.flags import (
    AsJson,
    On,
    ReportFile,
    Seed,
    Slots,
    Store,
    check_report,
    parse_budget_usd,
    parse_deadline_s,
    work_of,
)
from stretto.cli.live import measuring
from stretto.core.errors import InputError
from stretto.driving.request import TuneRequest
from stretto.driving.target import LOCAL
from stretto.launch.to_plan import study_to_plan
from stretto.policies.registry import make_policy, parse_options
from stretto.policies.rubberband.policy import RubberBand
from stretto.report.plan_page import write_plan_page
from stretto.report.plan_text import plan_text
from stretto.report.run_text import SLOTS
from stretto.simulation.plan import plan_json

PLANNING_OPTIONS = ("rubberband.planner", "rubberband.rule")
"""The options of rubberband that shape a plan; its others are for a run."""


def plan(
    study: Annotated[Path, typer.Argument(help="Study file; `stretto init study` writes one.")],
    work: Annotated[
        list[str] | None,
        typer.Argument(
            help="FILE:FUNCTION, or -- and a command, to measure.",
            metavar="[TRAIN]",
            show_default="the file's",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="When to be done: 2h, 18:00, none.", show_default="the file's"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="Spend no more; or none.", show_default="the file's")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="rubberband.OPTION=VALUE, such as rubberband.rule=mean.")
    ] = None,
    slots: Slots = None,
    on: On = LOCAL,
    store: Store = "",
    name: Annotated[
        str | None,
        typer.Option(help="Name of the later run; its profile is kept for it.", show_default="the study's"),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    report: ReportFile = None,
) -> None:
    r"""Plan a study: the cheapest way to meet a deadline, or the fastest within a budget.

    With a deadline: the cheapest plan that is on time with probability q. With a budget: the fastest that
    keeps it. With both: the cheapest that keeps both. With neither: the trade-off. No trial is started.

    A study without a [bold]\[profile][/bold] is measured first, on this machine or where --on says: for at
    most 90 s once it trains, and an eighth of the deadline; longer only for a first epoch. [bold]stretto
    tune[/bold] uses the same profile. The plan is for the [bold]\[cluster][/bold] of the file, else for
    where it would be tuned; on Ray with the present nodes. The exit code is 1 if no plan keeps the limits.

    Example: [bold]stretto plan study.toml --deadline 2h --report plan.html[/bold]
    Example: [bold]stretto plan study.toml train.py:train --deadline 10m[/bold]
    """
    options = _planning_options(option or [])
    check_report(report)
    with measuring(f" on {'this machine' if on == LOCAL else on}") as show:
        found = study_to_plan(
            TuneRequest(
                study=study,
                work=work_of(work or []),
                policy=RubberBand.name,
                options=options,
                deadline_s=_deadline_s(deadline),
                budget_usd=parse_budget_usd(budget),
                slots=slots,
                on=on,
                store=store,
                name=name,
                seed=seed,
            ),
            on_progress=show,
        )
    for note in found.notes:
        print(note, file=sys.stderr)
    policy = make_policy(RubberBand.name, options=options, tuning=found.file.tuning)
    assert isinstance(policy, RubberBand)
    # Measuring takes none of the study's time, but brings a time of day nearer.
    planned = found.plan(
        deadline_s=_deadline_s(deadline), planner=policy.planner, rule=policy.rule, seed=seed
    )
    unit = "" if found.held is None else SLOTS
    if as_json:
        print(json.dumps(plan_json(planned), indent=2, allow_nan=False))
    else:
        print(plan_text(planned.tuning, planned.outcome, unit, nearest=planned.nearest), end="")
    if report is not None:
        write_plan_page(report, planned, unit)
        print(f"report: {report}", file=sys.stderr)
    if not planned.outcome.feasible:
        raise typer.Exit(1)


def _deadline_s(text: str | None) -> float | None:
    return parse_deadline_s(text, datetime.now().astimezone())


def _planning_options(texts: Sequence[str]) -> Mapping[str, str]:
    """The options of the planner; InputError for any others."""
    options = parse_options(texts)
    for policy, values in options.items():
        for option in values:
            if f"{policy}.{option}" not in PLANNING_OPTIONS:
                raise InputError(
                    f"--set {policy}.{option} is not for planning.",
                    remedy=f"There are {' and '.join(PLANNING_OPTIONS)}.",
                )
    return options.get(RubberBand.name, {})
