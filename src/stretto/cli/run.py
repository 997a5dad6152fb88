"""`stretto run`: trains several jobs for real."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.flags import AsJson, InFolder, On, Seed, Slots, Store
from stretto.cli.live import stoppable, watching
from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.core.units import counted, parse_duration_s
from stretto.driving.stop import Stop
from stretto.driving.target import LOCAL
from stretto.inputs.cluster import slots_offer
from stretto.inputs.work import Entry
from stretto.launch.jobs import INTERVAL_S, CheckedJobs, JobsLaunch, RunRequest, check_run, earlier_run_result
from stretto.policies.registry import check_policies, check_targets, parse_options
from stretto.pricing.instances import Instance
from stretto.report.run_text import jobs_text
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RunFolder
from stretto.runs.job_results import RunResult
from stretto.runs.live_state import JobPhase
from stretto.runs.manage import unsaved_jobs
from stretto.runs.metrics_files import metrics_after

YES = "Do not ask before spending money or mending a damaged journal."


def run(
    jobs: Annotated[Path, typer.Argument(help="File of jobs; `stretto init jobs` writes one.")],
    policy: Annotated[str, typer.Option(help="Who decides which job gets what.")] = "pollux",
    interval: Annotated[
        str, typer.Option(metavar="DURATION", help="Decide at least this often.")
    ] = f"{INTERVAL_S:g}s",
    on: On = LOCAL,
    slots: Slots = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; the same resumes it.", show_default="the file's")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="POLICY.OPTION=VALUE, such as pollux.p=-1.")
    ] = None,
    retries: Annotated[int, typer.Option(help="Starts after a failure without progress.")] = 2,
    seed: Seed = 0,
    store: Store = "",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = False,
    in_folder: InFolder = False,
    yes: Annotated[bool, typer.Option("--yes", help=YES)] = False,
    as_json: AsJson = False,
) -> None:
    """Run several jobs that share a machine or cluster: who gets how many workers, and which batch size.

    All files are in runs/NAME. The same command resumes a run that was stopped or killed. Ctrl-C
    saves checkpoints and stops; a second one stops at once. The exit code is 1 if a job did not
    finish.

    Example: [bold]stretto run jobs.toml --policy pollux[/bold]
    Example: [bold]stretto run jobs.toml --on ray[/bold]
    """
    names = check_policies(policy)
    if len(names) != 1:
        raise InputError(f"--policy {policy}: a run has one policy.", remedy="Name one.")
    options = parse_options(option or [])
    check_targets(options, names)
    checked = check_run(
        RunRequest(
            jobs=jobs,
            policy=names[0],
            options=options.get(names[0], {}),
            interval_s=parse_duration_s(interval, where="--interval"),
            on=on,
            store=store,
            slots=slots,
            name=name,
            seed=seed,
            retries=retries,
            tensorboard=tensorboard,
            in_folder=in_folder,
        )
    )
    result = earlier_run_result(checked) or _run(checked, yes=yes)
    if damage := checked.folder.damage():
        say(damage)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2, allow_nan=False))
    else:
        print(jobs_text(result), end="")
    if result.ended_by == EndedBy.REQUEST:
        print(
            f"{how_it_stopped(checked.folder, saves=_saves(checked, result))}; {how_to_resume()}",
            file=sys.stderr,
        )
    if not result.succeeded:
        raise typer.Exit(1)


def _run(checked: CheckedJobs, *, yes: bool) -> RunResult:
    with (
        stoppable(checked.folder),
        checked.opened(yes=yes, confirm=confirm_mending(), tell=say) as target,
    ):
        launch = JobsLaunch(checked, target)
        for note in launch.notes:
            say(note)
        return _train(checked, launch, yes=yes)


def _train(checked: CheckedJobs, launch: JobsLaunch, *, yes: bool) -> RunResult:
    resumes, slots = checked.folder.is_begun, launch.slots
    if resumes:
        say(f"{checked.folder.path} is resumed.")
    else:
        (slot,) = slots_offer(slots, checked.file.machine).instances
        agree(slot, yes=yes)
    jobs = counted(len(checked.file.jobs), "job")
    title = f"{jobs} under {checked.request.policy} on {counted(slots, 'slot')}: {checked.folder.path}"
    stop, reported = Stop(), partial(metrics_after, checked.folder)
    try:
        real_run = launch.prepare(say)
        if not resumes:
            say(f"The run is in {checked.folder.path}.")
        with watching(title, stop=stop, reported=reported) as observer:
            return launch.start(real_run, stop, observer)
    except KeyboardInterrupt:
        begun = checked.folder.is_begun
        say(f"stopped at once; {how_to_resume() if begun else 'nothing was begun.'}")
        raise typer.Exit(1) from None


def say(text: str) -> None:
    """Prints a line on standard error at once."""
    print(text, file=sys.stderr, flush=True)


def confirm_mending() -> Callable[[str], bool] | None:
    """Asks whether a damaged journal may be mended; None without a terminal to ask on."""
    return _confirms if sys.stdin.isatty() else None


def _confirms(said: str) -> bool:
    print(said, file=sys.stderr)
    return typer.confirm("Resume from there?", err=True)


def agree(instance: Instance, *, yes: bool) -> None:
    """Asks before money is spent; InputError without a terminal to ask on, unless `yes`."""
    if yes or not instance.usd_per_hour:
        return
    if not sys.stdin.isatty():
        raise InputError(
            f"a {instance.name} costs ${instance.usd_per_hour:g} an hour, without a terminal to ask on.",
            remedy="Add --yes.",
        )
    typer.confirm("Spend this?", abort=True, err=True)


def _saves(checked: CheckedJobs, result: RunResult) -> bool:
    """Whether all jobs that were stopped save at a stop."""
    stopped = {job.id for job in result.jobs if job.state == JobPhase.PAUSED}
    specs = [spec for spec in checked.file.jobs if spec.name in stopped]
    return all(isinstance(spec.work, Entry) or spec.tier not in {None, Tier.RIGID} for spec in specs)


def how_it_stopped(folder: RunFolder, *, saves: bool) -> str:
    """The sentence about a run that was asked to stop; `saves`: its jobs should have saved."""
    if unsaved := unsaved_jobs(folder.events()):
        return f"stopped; {', '.join(unsaved)} did not save"
    return f"stopped{', with checkpoints saved' if saves else ''}"


def how_to_resume() -> str:
    """The command that resumes the run."""
    return f"resume with: {shlex.join(['stretto', *sys.argv[1:]])}"
