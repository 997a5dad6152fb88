"""`stretto runs`, `stop`, `logs` and `rm`: commands on existing runs."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.flags import AsJson
from stretto.core.errors import InputError
from stretto.core.units import format_duration, format_size
from stretto.report.text import markdown_table, one_line
from stretto.runs.deadline import when_to_resume
from stretto.runs.folder import RUNS, RunFolder
from stretto.runs.logs import LogInfo, follow, list_logs, log_of, pieces_of
from stretto.runs.manage import (
    RunInfo,
    ask_to_stop,
    check_removable,
    find_folder,
    list_runs,
    remove_run,
    run_info,
    wait_until_stopped,
    what_was_saved,
)
from stretto.runs.status import is_going_on

DAY_S = 86400.0
LONGEST_COMMAND = 60
LONGEST_LINE = 80

Run = Annotated[str, typer.Argument(help="A run under ./runs, or its folder.", show_default=False)]


def runs(
    folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = RUNS,
    as_json: AsJson = False,
) -> None:
    """List the runs, the newest first: state, best value, age, size and command.

    A run is running or measuring, or it was stopped (by Ctrl-C or `stretto stop`), interrupted (killed),
    finished, or ended by its deadline or budget. Repeat the command to resume a run that was
    stopped or interrupted. Damaged runs are listed with what is wrong.

    Example: [bold]stretto runs[/bold]
    """
    show_runs(folder, as_json=as_json)


def show_runs(folder: Path, *, as_json: bool) -> None:
    """Print the list, as a table or as JSON."""
    found = list_runs(folder)
    if as_json:
        plain = [{**dataclasses.asdict(line), "path": str(line.path)} for line in found]
        print(json.dumps({"runs": plain}, indent=2, allow_nan=False))
        return
    if not found:
        print(f"There are no runs in {folder}/. `stretto tune` and `stretto run` make some.")
        return
    heading = ("run", "state", "best", "age", "size", "command")
    print(markdown_table(heading, [_row(line) for line in found], left=6))
    for line in found:
        if line.problem:
            print(one_line(line.problem))


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="End it at once, like a second Ctrl-C.")] = False,
) -> None:
    """Stop a live run, as Ctrl-C does in its terminal, and wait until it has stopped.

    Its jobs save checkpoints and stop. Repeat the command that began the run to resume it. With
    [bold]--now[/bold] the jobs end at once, without saving. A second stop does no harm. Ctrl-C ends only
    the waiting. The exit code is 0 also if the run was not running.

    Example: [bold]stretto stop resnet-cifar[/bold]
    """
    folder = find_folder(run)
    begun = folder.is_begun
    holder = ask_to_stop(folder, at_once=now) if is_going_on(folder) else None
    if holder is None:
        line = run_info(folder, time.time())
        print(f"{folder.path} is not running: {line.state}.")
        return
    how = " at once" if now else " once its jobs have saved" if begun else ""
    print(f"asked process {holder.pid} to stop{how}.", file=sys.stderr, flush=True)
    try:
        wait_until_stopped(folder)
    except KeyboardInterrupt:
        again = f"`stretto stop {run} --now` ends it at once"
        print(f"{folder.path} is still stopping; {again}.", file=sys.stderr)
        raise typer.Exit(1) from None
    print(_stopped(folder))


def _stopped(folder: RunFolder) -> str:
    line = run_info(folder, time.time())
    if not folder.is_begun:
        kept = (
            f"the measured speeds are kept in {folder.profile}"
            if folder.profile.is_file()
            else "there is nothing to resume"
        )
        return f"{folder.path}: stopped before its first job started; {kept}."
    saved = what_was_saved(folder)
    parts = [f"{folder.path}: {line.state}", *([saved] if saved else [])]
    if line.state in {"stopped", "interrupted"}:
        when = when_to_resume(folder.begun_spec(), time.time())
        parts.append("\n".join(filter(None, (f"resume with: {line.command}", when))))
    return "; ".join(parts)


def logs(
    run: Run,
    job: Annotated[str | None, typer.Argument(help="A job or trial of it.", show_default=False)] = None,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the run ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the output of a job, on this machine or a Ray cluster, also after the run has ended.

    Without a job, list all logs with their last lines; with [bold]-f[/bold], follow all jobs, with the
    job before each line.

    Example: [bold]stretto logs resnet-cifar trial-003 -f[/bold]
    """
    folder = find_folder(run)
    if as_json and (following or job is not None):
        raise InputError("--json is for the list of logs.", remedy="Leave out the job and -f.")
    if job is not None:
        log = log_of(folder, job)
    try:
        if following:
            follow(folder, job, _write)
        elif job is None:
            _show_logs(folder, list_logs(folder), as_json=as_json)
        elif not log.is_file():
            print(f"{job} has printed nothing yet: there is no {log}.", file=sys.stderr)
        else:
            for piece in pieces_of(log):
                _write(piece)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _write(piece: bytes) -> None:
    """Write it unchanged, with colours."""
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _show_logs(folder: RunFolder, found: tuple[LogInfo, ...], *, as_json: bool) -> None:
    if as_json:
        plain = [{**dataclasses.asdict(line), "path": str(line.path)} for line in found]
        print(json.dumps({"logs": plain}, indent=2, allow_nan=False))
        return
    if not found:
        print(f"{folder.path} has no logs: none of its jobs was started.")
        return
    now_s = time.time()
    rows = [
        [
            one_line(line.job) or "-",
            format_size(line.size_bytes),
            "-" if line.changed_s is None else f"{age_text(max(now_s - line.changed_s, 0.0))} ago",
            str(line.path),
            _cut(one_line(line.last_line), LONGEST_LINE),
        ]
        for line in found
    ]
    print(markdown_table(("job", "size", "last", "log", "last line"), rows, left=5))
    name = folder.name if folder.path.parent == RUNS else str(folder.path)
    print(f"`stretto logs {name} JOB` prints one, -f follows it.")


def rm(
    names: Annotated[list[str], typer.Argument(metavar="RUN..", help="Runs under ./runs, or their folders.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs with everything in their folders: journals, logs, checkpoints.

    Live runs and folders that are no runs are refused. Links are not followed. Copies of checkpoints in a
    [bold]--store[/bold] stay.

    Example: [bold]stretto rm old-study[/bold]
    """
    folders = [find_folder(name) for name in dict.fromkeys(names)]
    for folder in folders:
        check_removable(folder)
    lines = [run_info(folder, time.time()) for folder in folders]
    if not yes:
        _agree(lines)
    for folder, line in zip(folders, lines, strict=True):
        remove_run(folder)
        print(f"removed {folder.path} ({format_size(line.size_bytes)})")


def _agree(lines: list[RunInfo]) -> None:
    what = "; ".join(_in_words(line) for line in lines)
    if not sys.stdin.isatty():
        raise InputError(
            f"removing {what} needs your agreement, and there is no terminal to ask on.", remedy="Add --yes."
        )
    typer.confirm(f"Remove {what}?", abort=True, err=True)


def _in_words(line: RunInfo) -> str:
    facts = ", ".join(filter(None, (line.state, line.best, format_size(line.size_bytes))))
    return f"{line.path} ({one_line(facts)})"


def _row(line: RunInfo) -> list[str]:
    return [
        one_line(line.name),
        line.state,
        one_line(line.best) or "-",
        age_text(line.age_s),
        format_size(line.size_bytes),
        _cut(one_line(line.command), LONGEST_COMMAND) or "-",
    ]


def age_text(age_s: float) -> str:
    """A short duration: 45s, 12m 05s, 3h 20m, 4d 03h."""
    if age_s < DAY_S:
        return format_duration(age_s)
    hours = round(min(age_s, 1e9) / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
