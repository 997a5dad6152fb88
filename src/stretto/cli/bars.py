"""Progress bars of simulations, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from stretto.core.units import format_duration
from stretto.simulation.jobs import Tick


@contextmanager
def step_bar(title: str, steps: int) -> Iterator[Callable[[], None]]:
    """Shows how many steps are done while the block runs."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=steps)
        yield lambda: progress.advance(task)


@contextmanager
def progress_bar(title: str, jobs: int) -> Iterator[Callable[[Tick], None]]:
    """Shows finished jobs and simulated time while the block runs."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs, {task.fields[clock]} simulated"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=jobs, clock="0s")

        def tick(now: Tick) -> None:
            progress.update(task, completed=now.finished, clock=format_duration(now.now_s))

        yield tick
