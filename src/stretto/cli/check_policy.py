"""`stretto check-policy`: runs the conformance suite on a policy."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from stretto.core.errors import InputError
from stretto.policies.base import Oracle, Policy
from stretto.policies.registry import check_targets, make_policy, parse_options

LONGEST = 600
"""The most characters shown of a failed check's message."""


def check_policy(
    policy: Annotated[str, typer.Argument(help="FILE.py:CLASS, or the name of an installed policy.")],
    servers: Annotated[
        bool, typer.Option(help="Also try jobs with parameter servers and CPU or memory demands.")
    ] = True,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="POLICY.OPTION=VALUE, such as pollux.p=-1.")
    ] = None,
) -> None:
    """Check a policy on random clusters and in a small simulation, and report what it does wrong.

    The checks: decisions fit the nodes, gangs are whole, every change and wait has a reason, the same
    question gets the same answer, memory survives a restart, draining nodes empty, every job ends.

    Example: [bold]stretto check-policy mine.py:LargestFirst[/bold]
    """
    try:
        from stretto.testing.policies import FormulaOracle, PolicyConformance  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name}, which draws the random clusters, is not installed.",
            remedy="pip install hypothesis",
        ) from error
    options = parse_options(option or [])
    check_targets(options, [policy])
    chosen = options.get(policy)
    make_policy(policy, options=chosen, oracle=FormulaOracle())

    class Suite(PolicyConformance):
        with_servers = servers

        def policy(self, oracle: Oracle) -> Policy:
            return make_policy(policy, options=chosen, oracle=oracle)

    suite, failed = Suite(), 0
    for name in [name for name in dir(suite) if name.startswith("test_")]:
        title = name.removeprefix("test_").replace("_", " ")
        try:
            getattr(suite, name)()
        except Exception as error:  # noqa: BLE001 - whatever a policy raises is a failed check
            failed += 1
            said = str(error).strip() or "an assertion failed"
            print(f"FAILED  {title}: {type(error).__name__}: {said[:LONGEST]}{_place(error, policy)}")
        else:
            print(f"ok      {title}")
        sys.stdout.flush()
    print(f"{policy}: {'every check passed' if not failed else f'{failed} checks failed'}")
    if failed:
        raise typer.Exit(1)


def _place(error: Exception, policy: str) -> str:
    """The last line of the policy's own file that led to the error; empty if there is none."""
    file = Path(policy.rpartition(":")[0]).absolute()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    return f" ({file.name}, line {lines[-1]})" if lines else ""
