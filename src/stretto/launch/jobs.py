"""Running several jobs for real on one machine or cluster, which they share under a policy."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from stretto.core.errors import InputError
from stretto.core.source import Arrivals
from stretto.driving.drive import NoObserver, Observer, RealRun, drive, wall_clock
from stretto.driving.stop import Stop, interrupting
from stretto.driving.substrate import MakeSubstrate, TrainingSpec
from stretto.driving.target import LOCAL, OpenTarget, Target, TargetRequest, find_target, local_devices
from stretto.inputs.arguments import (
    given_flag,
    given_interval_s,
    given_options,
    given_path,
    given_progress,
    given_text,
    given_whole,
)
from stretto.inputs.jobs import JobsFile, complete, read_jobs
from stretto.inputs.work import CommandLine, Entry, in_own_folder
from stretto.launch.describe import Ask, Describe, Tell, describe_entries
from stretto.launch.progress import telling
from stretto.policies.base import Policy
from stretto.policies.registry import make_policy, rents_nodes
from stretto.runs.begin import begin, check_room, check_same
from stretto.runs.folder import RUNS, RunFolder, RunSpec, Tables, first_nodes, run_folder, unreadable
from stretto.runs.job_results import RunResult, run_result
from stretto.runs.mend import mend
from stretto.runs.metrics_files import metrics_after
from stretto.runs.status import holding, read_ending
from stretto.system.locks import myself
from stretto.wire.messages import Described

INTERVAL_S = 10.0
"""Policies were published with a minute or more, when a change meant a restart of as much: here it takes a
tenth of a second, and slots that a job leaves should not stand idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What was asked for."""

    jobs: Path
    policy: str = "pollux"
    options: Mapping[str, str] = field(default_factory=dict)
    interval_s: float = INTERVAL_S
    """How often the policy is asked, whatever happens."""
    on: str = LOCAL
    """`local`, `ray` or `ray:ADDRESS`."""
    store: str = ""
    """Where checkpoints go besides the run's folder: a path or URL that fsspec knows."""
    slots: int | None = None
    name: str | None = None
    """None: the file's name."""
    runs: Path = RUNS
    seed: int = 0
    retries: int = 2
    tensorboard: bool = False
    in_folder: bool = False
    """Each job's command runs in a folder of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A request in which everything that can be wrong beforehand is right."""

    request: RunRequest
    file: JobsFile
    target: Target
    folder: RunFolder

    @property
    def asked(self) -> Tables:
        """What must be the same for the run to be resumed."""
        request = self.request
        return {
            "jobs": json.loads(json.dumps(self.file.tables, default=str)),
            "works": {job.name: str(job.work) for job in self.file.jobs},
            **({"in_folder": True} if self.request.in_folder else {}),
            "policy": request.policy,
            "options": dict(request.options),
            "interval_s": request.interval_s,
            **self.target.asked,
            "seed": request.seed,
        }

    def policy(self) -> Policy:
        request = self.request
        return make_policy(request.policy, options=request.options, interval_s=request.interval_s)


def check_run(request: RunRequest) -> CheckedRun:
    """Read the jobs and check everything that was asked; InputError for anything wrong."""
    file = _in_folders(read_jobs(request.jobs), asked=request.in_folder)
    if request.retries < 0:
        raise InputError(f"{request.retries} retries are less than none.", remedy="Give 0 or more.")
    if not request.interval_s > 0:
        raise InputError(
            f"an interval of {request.interval_s:g} s is not above 0.", remedy="Give more, such as 10 s."
        )
    target = find_target(
        TargetRequest(
            on=request.on,
            slots=request.slots,
            store=request.store,
            runs=request.runs,
            machine=file.machine,
        )
    )
    for job in file.jobs:
        target.check(job.work)
    checked = CheckedRun(
        request=request,
        file=file,
        target=target,
        folder=run_folder(request.jobs.stem if request.name is None else request.name, request.runs),
    )
    if rents_nodes(checked.policy()):
        raise InputError(
            f"policy {request.policy} rents nodes for a study.", remedy="Take another, or `stretto tune`."
        )
    return checked


def _in_folders(file: JobsFile, *, asked: bool) -> JobsFile:
    """The jobs, whose commands run in folders of their own if that is asked."""
    jobs = tuple(dataclasses.replace(job, work=in_own_folder(job.work, asked=asked)) for job in file.jobs)
    return dataclasses.replace(file, jobs=jobs)


def finished_run(checked: CheckedRun) -> RunResult | None:
    """What a run of this name came to, if it is over; InputError if it was begun otherwise."""
    spec = checked.folder.spec()
    if spec is None:
        return None
    check_same(checked.folder, spec, "run", checked.asked)
    ended_by = read_ending(checked.folder)
    return None if ended_by is None else run_result(checked.folder, ended_by)


def start_run(
    checked: CheckedRun,
    *,
    stop: Stop | None = None,
    observer: Observer | None = None,
    make: MakeSubstrate | None = None,
    describe: Describe = describe_entries,
    on_begun: Callable[[], None] = lambda: None,
    tell: Tell = lambda _: None,
) -> RunResult:
    """Begin the run, or go on with it, until every job is over or `stop` is asked.

    `on_begun` is called once nothing stands in its way any more and its folder is there; `tell` is told what
    is looked at before. `make` takes the place of the target's own substrate.
    """
    check_room(checked.folder.path)
    with (
        holding(checked.folder, local_devices(checked.target)),
        checked.target.opened() as target,
    ):
        score = _begin(checked, target, make or target.make, partial(describe, tell=tell))
        on_begun()
        ended_by = drive(score, stop or Stop(), observer or NoObserver())
        if ended_by.for_good:
            checked.folder.write("result", {"ended_by": str(ended_by)})
    return run_result(checked.folder, ended_by)


def _begin(checked: CheckedRun, target: OpenTarget, make: MakeSubstrate, describe: Ask) -> RealRun:
    """Ask the training code what it wants, and write down how the run is begun, unless that was done."""
    folder, request = checked.folder, checked.request
    slots = target.offer.slots
    described = _described(checked, target, describe)
    jobs = [complete(spec, described.get(spec.name), slots) for spec in checked.file.jobs]
    spec = begin(
        folder,
        RunSpec(
            kind="run",
            started_at_s=time.time(),
            command=myself().command,
            asked=checked.asked,
            slots=slots,
            usd_per_slot_hour=checked.file.machine.usd_per_slot_hour,
        ),
    )
    folder.write("described", {name: dataclasses.asdict(one) for name, one in described.items()})
    works = {job.name: job.work for job in checked.file.jobs}
    begun = first_nodes(folder)
    training = TrainingSpec(
        work=lambda job: works.get(job.id, checked.file.jobs[0].work),
        slots=max(slots, spec.slots),
        nodes=target.held if begun is None else begun,
        seed=request.seed,
        retries=request.retries,
        tensorboard=request.tensorboard,
        runs_commands=any(isinstance(work, CommandLine) for work in works.values()),
    )
    return RealRun(
        folder=folder,
        policy=checked.policy(),
        make=lambda: make(training, folder, wall_clock(spec.started_at_s)),
        nodes=training.nodes,
        source=Arrivals(jobs),
        seed=request.seed,
        share_priors=True,
    )


def run(
    jobs: Path | str,
    *,
    policy: str = "pollux",
    options: Mapping[str, str] | None = None,
    interval_s: float = INTERVAL_S,
    on: str = LOCAL,
    store: str = "",
    slots: int | None = None,
    name: str | None = None,
    folder: Path | str = RUNS,
    seed: int = 0,
    retries: int = 2,
    tensorboard: bool = False,
    in_folder: bool = False,
    yes: bool = False,
    progress: Callable[[str], None] | None = None,
) -> RunResult:
    """Run the jobs of a file, or resume the run of this name, and say what came of it.

    They share this machine, or a Ray cluster: `on` is "local", "ray" or "ray:ADDRESS". Files go to
    `folder`/`name`, checkpoints also to `store`, a path or URL that fsspec knows. `in_folder` has each
    command run in a folder of its own. `progress`, such as print, is called with a line of text for every
    change on the way. `yes` lets a run whose journal is damaged go on from before the damage.

    Ctrl-C or SIGTERM stops it with checkpoints saved, and then raises KeyboardInterrupt; the same call
    goes on with it.
    """
    checked = check_run(
        RunRequest(
            jobs=given_path(jobs, "jobs", "jobs.toml"),
            policy=given_text(policy, "policy", "pollux"),
            options=given_options(options),
            interval_s=given_interval_s(interval_s),
            on=given_text(on, "on", LOCAL),
            store=given_text(store, "store", "s3://bucket/runs"),
            slots=None if slots is None else given_whole(slots, "slots"),
            name=None if name is None else given_text(name, "name", "first"),
            runs=given_path(folder, "folder", str(RUNS)),
            seed=given_whole(seed, "seed"),
            retries=given_whole(retries, "retries"),
            tensorboard=given_flag(tensorboard, "tensorboard"),
            in_folder=given_flag(in_folder, "in_folder"),
        )
    )
    tell = given_progress(progress)
    over = finished_run(checked)
    if over is not None:
        return over
    if (mended := mend(checked.folder, yes=given_flag(yes, "yes"))) and tell is not None:
        tell(mended)
    reported = partial(metrics_after, checked.folder)
    if tell is not None:
        with checked.target.opened() as target:
            for note in target.notes:
                tell(note)
    with interrupting() as stop, telling(tell, stop=stop, reported=reported) as observer:
        return start_run(checked, stop=stop, observer=observer, tell=tell or _to_nobody)


def _to_nobody(text: str) -> None:
    """Who calls does not want to know."""


def _described(checked: CheckedRun, target: OpenTarget, describe: Ask) -> dict[str, Described]:
    """What the training code of the jobs says of itself: as it did when the run was begun."""
    folder, specs = checked.folder, checked.file.jobs
    kept = folder.read("described") if folder.is_begun else None
    try:
        described = msgspec.convert(kept or {}, dict[str, Described])
    except msgspec.ValidationError as error:
        raise unreadable(folder.path / "described.json", f"is not as it was written: {error}.") from error
    unknown = [spec for spec in specs if isinstance(spec.work, Entry) and spec.name not in described]
    return described | describe(unknown, target, folder.failed_log) if unknown else described
