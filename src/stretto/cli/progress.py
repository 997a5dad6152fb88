"""What a command is at, on standard error: bars on a terminal; elsewhere nothing, or lines of a probe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from stretto.app.probe_seen import Progress as ProbeProgress
from stretto.app.real_lines import measuring_line
from stretto.app.real_stop import signals_interrupt
from stretto.app.run_folder import RunFolder
from stretto.app.simulate import Tick
from stretto.core.units import format_duration


@contextmanager
def measuring(where: str = "", *, resumes: bool = False) -> Iterator[Callable[[ProbeProgress], None]]:
    """Shows what a probe does on standard error while the block runs: on a terminal, or in plain lines.

    Ctrl-C ends the command with a word: there is nothing to resume yet, unless it `resumes` a run.
    """
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:

            def show(progress: ProbeProgress) -> None:
                text = measuring_line(progress, where)
                if not console.is_terminal:
                    print(text, file=sys.stderr, flush=True)
                elif shown.tasks:
                    shown.update(shown.tasks[0].id, description=text)
                else:
                    shown.add_task(text, total=None)

            yield show
    except KeyboardInterrupt:
        if resumes:
            print("stopped before the run went on; it is as it was.", file=sys.stderr)
        else:
            print("stopped while measuring; nothing was begun.", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def stoppable(folder: RunFolder) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with a sentence, also where nothing listens: between two phases."""
    try:
        with signals_interrupt():
            yield
    except KeyboardInterrupt:
        begun = "; the same command goes on with the run" if folder.is_begun else ""
        print(f"stopped{begun or ' before training began; nothing was begun'}.", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def step_bar(title: str, steps: int) -> Iterator[Callable[[], None]]:
    """Shows how many steps are done, on standard error, while the block runs."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=steps)
        yield lambda: progress.advance(task)


@contextmanager
def progress_bar(title: str, jobs: int) -> Iterator[Callable[[Tick], None]]:
    """Shows finished jobs and simulated time on standard error while the block runs."""
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
