"""`stretto tune`: trains a study for real."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stretto.cli.flags import (
    AsJson,
    InFolder,
    On,
    Seed,
    Slots,
    Store,
    parse_budget_usd,
    parse_deadline_s,
    work_of,
)
from stretto.cli.live import Outlook, measuring, stoppable, watching
from stretto.cli.run import YES, agree, confirm_mending, how_it_stopped, how_to_resume, say
from stretto.core.errors import InputError
from stretto.core.units import counted, format_duration, format_usd
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.stop import Stop
from stretto.driving.target import LOCAL
from stretto.launch.tune import StudyLaunch, earlier_result, elsewhere
from stretto.policies.registry import check_policies, check_targets, parse_options
from stretto.pricing.instances import Instance
from stretto.report.run_text import expectation_text, replayed_json, tune_text
from stretto.runs.deadline import AtDeadline, EndedBy, left_until_s, what_lets_go_on, when_to_resume
from stretto.runs.folder import RunFolder
from stretto.runs.results import TuneResult


def tune(
    study: Annotated[Path, typer.Argument(help="Study file; `stretto init study` writes one.")],
    work: Annotated[
        list[str] | None,
        typer.Argument(
            help="FILE:FUNCTION, or -- and a command.", metavar="[TRAIN]", show_default="the file's"
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="When to be done: 10m, 18:00, none.", show_default="the file's"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="Spend no more; or none.", show_default="the file's")
    ] = None,
    policy: Annotated[str, typer.Option(help="Who decides about trials.")] = "hypersched",
    on: On = LOCAL,
    slots: Slots = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; the same resumes it.", show_default="the study's")
    ] = None,
    at_deadline: Annotated[
        AtDeadline, typer.Option(help="What trials do when the deadline comes.")
    ] = AtDeadline.STOP,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="POLICY.OPTION=VALUE, such as hypersched.share=top.")
    ] = None,
    retries: Annotated[int, typer.Option(help="Starts after a failure without progress.")] = 2,
    seed: Seed = 0,
    store: Store = "",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="The command saves on SIGTERM and resumes.")
    ] = False,
    in_folder: InFolder = False,
    yes: Annotated[bool, typer.Option("--yes", help=YES)] = False,
    as_json: AsJson = False,
) -> None:
    """Tune a study: the best model by a deadline, or the cheapest way to be on time.

    Prints the plan, trains, then prints the best configuration and its checkpoint. All files are in
    runs/NAME. The same command resumes a run that was stopped or killed; after a deadline or budget
    stop, raise the limit. Ctrl-C saves checkpoints and stops; a second one stops at once. The exit
    code is 1 if the run is not over, or a trial failed.

    Example: [bold]stretto tune study.toml train.py:train --deadline 10m[/bold]
    Example: [bold]stretto tune study.toml --deadline 10m -- python train.py --lr {lr}[/bold]
    Example: [bold]stretto tune study.toml train.py:train --on ray --policy rubberband[/bold]
    """
    names = check_policies(policy)
    if len(names) != 1:
        raise InputError(f"--policy {policy}: a run has one policy.", remedy="Name one.")
    options = parse_options(option or [])
    check_targets(options, names)
    checked = check_request(
        TuneRequest(
            study=study,
            work=work_of(work or []),
            deadline_s=parse_deadline_s(deadline, datetime.now().astimezone()),
            deadline_as=deadline,
            budget_usd=parse_budget_usd(budget),
            policy=names[0],
            options=options.get(names[0], {}),
            on=on,
            store=store,
            slots=slots,
            name=name,
            seed=seed,
            at_deadline=at_deadline,
            retries=retries,
            tensorboard=tensorboard,
            checkpoints=checkpoints,
            in_folder=in_folder,
        )
    )
    over = earlier_result(checked, say)
    result = over or _run(checked, yes=yes, as_json=as_json)
    if damage := checked.folder.damage():
        say(damage)
    _show(checked, result, as_json=as_json)
    if over and (way := what_lets_go_on(checked.folder.begun_spec(), over.ended_by, time.time())):
        say(f"{checked.folder.path}: {way}.")
    if not result.succeeded or result.failed:
        raise typer.Exit(1)


def _run(checked: CheckedStudy, *, yes: bool, as_json: bool) -> TuneResult:
    with (
        stoppable(checked.folder),
        checked.opened(yes=yes, confirm=confirm_mending(), tell=say) as target,
    ):
        launch = StudyLaunch(checked, target)
        for note in launch.notes:
            say(note)
        _agree_to_measure(launch.node_to_launch, yes=yes)
        return _train(checked, launch, yes=yes, out=sys.stderr if as_json else sys.stdout)


def _agree_to_measure(node: Instance | None, *, yes: bool) -> None:
    if node is None:
        return
    say(
        "The speed of the training is unknown, and there is no node to measure on: "
        f"a {node.name} is launched for it, at ${node.usd_per_hour:g} an hour.",
    )
    agree(node, yes=yes)


def _train(checked: CheckedStudy, launch: StudyLaunch, *, yes: bool, out: TextIO) -> TuneResult:
    with measuring(resumes=checked.folder.is_begun) as show:
        prepared = launch.prepare(show)
    tuning, request = prepared.tuning, checked.request
    if prepared.resumes:
        say(f"{checked.folder.path} is resumed.")
    else:
        say(prepared.speeds)
        given_s, left_s = checked.limits.deadline_s, tuning.limits.deadline_s
        if given_s is not None and left_s is not None and given_s - left_s >= 1.0:
            gone = f"{format_duration(given_s - left_s)} of the {format_duration(given_s)}"
            say(f"Measuring and planning took {gone} until the deadline.")
        if checked.measuring_usd and checked.limits.budget_usd is not None:
            spent = f"{format_usd(checked.measuring_usd)} of the ${checked.limits.budget_usd:g}"
            say(f"Measuring has cost {spent} budget; the rest is for the run.")
        print(expectation_text(tuning, request.policy, prepared.expectation), file=out, flush=True)
        agree(max((*tuning.instances, *tuning.own), key=lambda one: one.usd_per_hour), yes=yes)
    slots = prepared.offer.slots
    title = f"{tuning.study.name} under {request.policy} on {counted(slots, 'slot')}: {checked.folder.path}"
    outlook = Outlook(
        tuning=tuning,
        finish_s=prepared.expectation.finish_s,
        usd_per_slot_hour=checked.outline.machine.usd_per_slot_hour,
    )
    stop = Stop()
    try:
        with watching(title, stop=stop, study=tuning.study, outlook=outlook) as observer:
            return launch.start(prepared, stop, observer)
    except KeyboardInterrupt:
        say(f"stopped at once; {how_to_go_on(checked.folder)}")
        raise typer.Exit(1) from None


def _show(checked: CheckedStudy, result: TuneResult, *, as_json: bool) -> None:
    other = elsewhere(checked, result)
    if as_json:
        compared = None if other is None else replayed_json(other)
        print(json.dumps({**result.as_dict(), "elsewhere": compared}, indent=2, allow_nan=False))
    else:
        print(tune_text(result, checked.outline.study, other), end="")
    if result.ended_by == EndedBy.REQUEST:
        stopped = how_it_stopped(checked.folder, saves=checked.elastic)
        say(f"{stopped}; {how_to_go_on(checked.folder)}")


def how_to_go_on(folder: RunFolder) -> str:
    """How to resume a run that was stopped; its deadline may have passed."""
    spec = folder.spec()
    if spec is None:
        return how_to_resume()
    if left_until_s(spec, time.time()) <= 0.0:
        return "its deadline has passed: resume with a later --deadline"
    return "\n".join(filter(None, (how_to_resume(), when_to_resume(spec, time.time()))))
