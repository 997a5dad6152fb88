"""`stretto decide`: one decision from a snapshot of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stretto.cli.flags import AsJson
from stretto.core.errors import InputError
from stretto.inputs.snapshot import read_snapshot
from stretto.policies.registry import check_policies, check_targets, parse_options
from stretto.simulation.decide import Answer
from stretto.simulation.decide import decide as ask
from stretto.system.plain_json import json_data


def decide(
    snapshot: Annotated[Path, typer.Argument(help="The cluster's state, a JSON file (docs/snapshot.md).")],
    policy: Annotated[str, typer.Option(help="The policy to ask.")] = "pollux",
    option: Annotated[
        list[str] | None, typer.Option("--set", help="POLICY.OPTION=VALUE, such as pollux.p=-1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a policy once: who should get how many GPUs, where, and with which batch size.

    Example: [bold]stretto decide cluster.json --policy pollux --json[/bold]
    """
    names = check_policies(policy)
    if len(names) != 1:
        raise InputError(f"--policy {policy}: one decision takes one policy.", remedy="Name one.")
    options = parse_options(option or [])
    check_targets(options, names)
    answer = ask(read_snapshot(snapshot), names[0], options=options.get(names[0]))
    if as_json:
        print(json.dumps(json_data(answer.as_dict()), indent=2, allow_nan=False))
    else:
        _show(answer)


def _show(answer: Answer) -> None:
    table = Table("job", "GPUs", "nodes", "batch", "why", box=None, pad_edge=False)
    decided = answer.as_dict()
    for job, held in decided["allocations"].items():
        batch = decided["batch"].get(job)
        reason = decided["reasons"].get(job)
        table.add_row(
            job,
            str(sum(held.values())),
            " ".join(f"{node}:{gpus}" for node, gpus in held.items()) or "-",
            f"{batch['atomic']} x {batch['accumulation'] + 1}" if batch else "-",
            f"{reason['code']}: {reason['text']}" if reason else "kept: stays as it is",
        )
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False).print(table)
    objective = "-" if answer.objective is None else f"{answer.objective:.5f}"
    print(f"objective {objective}, decided in {answer.decision_ms:.1f} ms")
