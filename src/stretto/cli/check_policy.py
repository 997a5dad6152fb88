"""`stretto check-policy`: runs the conformance suite on a policy."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from stretto.core.errors import InputError, PolicyError
from stretto.core.units import counted
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

    failed = _run_checks(Suite())
    print(f"{policy}: {f'{failed} checks failed' if failed else 'every check passed'}")
    if failed:
        raise typer.Exit(1)


def _run_checks(suite: object) -> int:
    """Prints a line for each check, then each mistake once; returns how many checks failed."""
    failures: dict[object, list[str]] = {}
    with _folder_of_hypothesis():
        for name in [name for name in dir(suite) if name.startswith("test_")]:
            title = name.removeprefix("test_").replace("_", " ")
            try:
                getattr(suite, name)()
            except Exception as error:  # noqa: BLE001 - whatever a policy raises is a failed check
                print(f"FAILED  {title}", flush=True)
                failures.setdefault(_mistake(error), []).append(f"{title}: {_sentence(error)}")
            else:
                print(f"ok      {title}", flush=True)
    for first, *others in failures.values():
        print(first)
        if others:
            print(f"    The same in {counted(len(others), 'other check')}.")
    return sum(len(same) for same in failures.values())


@contextmanager
def _folder_of_hypothesis() -> Iterator[None]:
    """Gives hypothesis a temporary folder; otherwise it leaves `.hypothesis` in the current one."""
    from hypothesis.configuration import set_hypothesis_home_dir  # noqa: PLC0415 - an extra

    with TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


def _mistake(error: Exception) -> object:
    """Equal for failures of one kind that were raised by one line."""
    origin = error.__cause__ if isinstance(error, PolicyError) and error.__cause__ else error
    frame = traceback.extract_tb(origin.__traceback__)[-1]
    return type(origin), frame.filename, frame.lineno


def _sentence(error: Exception) -> str:
    if isinstance(error, PolicyError):
        return error.problem[:LONGEST]
    said = str(error).strip() or "an assertion failed"
    return f"{type(error).__name__}: {said[:LONGEST]}"
