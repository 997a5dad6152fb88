"""Running several jobs for real: they share one machine or cluster under a policy.

`check_run` reads the request; `CheckedJobs.opened` opens its target; `JobsLaunch` asks the training code what
it needs and then trains there. `stretto.run` and `stretto run` both take these steps.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from stretto.core.errors import InputError
from stretto.core.source import Arrivals
from stretto.driving.drive import NoObserver, Observer, RealRun, drive, wall_clock
from stretto.driving.request import CheckedRequest, RealRequest
from stretto.driving.stop import Stop, interrupting
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import LOCAL, OpenTarget
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
from stretto.inputs.work import CommandLine, Entry, folder_note, in_own_folder
from stretto.launch.describe import Tell, describe_entries
from stretto.launch.progress import telling
from stretto.policies.base import Policy
from stretto.policies.registry import make_policy, rents_nodes
from stretto.runs.begin import begin, check_room, check_same
from stretto.runs.folder import RUNS, RunSpec, Tables, first_nodes, run_folder, unreadable
from stretto.runs.job_results import RunResult, run_result
from stretto.runs.metrics_files import metrics_after
from stretto.runs.status import read_ending
from stretto.system.locks import myself
from stretto.wire.messages import Described

INTERVAL_S = 10.0
"""Policies were published with a minute or more, when a resize meant a restart. Here a resize takes a tenth
of a second, and free slots should not stay idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(RealRequest):
    """What `run` is asked for."""

    jobs: Path
    policy: str = "pollux"
    interval_s: float = INTERVAL_S
    """The policy decides at least this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJobs(CheckedRequest):
    """Jobs to run."""

    request: RunRequest
    file: JobsFile
    policy: Policy

    @property
    def asked(self) -> Tables:
        """The settings that must be equal for the run to be resumed."""
        request = self.request
        return {
            "jobs": json.loads(json.dumps(self.file.tables, default=str)),
            "works": {job.name: str(job.work) for job in self.file.jobs},
            **({"in_folder": True} if request.in_folder else {}),
            "policy": request.policy,
            "options": dict(request.options),
            "interval_s": request.interval_s,
            **self.target.asked,
            "seed": request.seed,
        }


def check_run(request: RunRequest) -> CheckedJobs:
    """Reads the jobs and checks all that was asked for; InputError for anything wrong."""
    file = _in_folders(read_jobs(request.jobs), asked=request.in_folder)
    if not request.interval_s > 0:
        raise InputError(
            f"an interval of {request.interval_s:g} s is not above 0.", remedy="Give more, such as 10 s."
        )
    target = request.target(file.machine)
    for job in file.jobs:
        target.check(job.work)
    policy = make_policy(request.policy, options=request.options, interval_s=request.interval_s)
    if rents_nodes(policy):
        raise InputError(
            f"policy {request.policy} rents nodes for a study.", remedy="Take another, or `stretto tune`."
        )
    return CheckedJobs(
        request=request,
        file=file,
        target=target,
        folder=run_folder(request.jobs.stem if request.name is None else request.name, request.runs),
        policy=policy,
    )


def _in_folders(file: JobsFile, *, asked: bool) -> JobsFile:
    """The jobs, with a folder for each command if that is asked for."""
    jobs = tuple(dataclasses.replace(job, work=in_own_folder(job.work, asked=asked)) for job in file.jobs)
    return dataclasses.replace(file, jobs=jobs)


def earlier_run_result(checked: CheckedJobs) -> RunResult | None:
    """The result of the run of this name, if it is over; InputError if it was begun with other settings."""
    spec = checked.folder.spec()
    if spec is None:
        return None
    check_same(checked.folder, spec, "run", checked.asked)
    ended_by = read_ending(checked.folder)
    return None if ended_by is None else run_result(checked.folder, ended_by)


class JobsLaunch:
    """Jobs on their open target: `prepare` asks the training code what it needs, `start` trains."""

    def __init__(self, checked: CheckedJobs, target: OpenTarget) -> None:
        self._checked = checked
        self._folder = checked.folder
        self._target = target

    @property
    def slots(self) -> int:
        """Workers at once."""
        return self._target.offer.slots

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the start."""
        in_folders = (folder_note(job.work, self._folder.path) for job in self._checked.file.jobs)
        return (*self._target.notes, *dict.fromkeys(filter(None, in_folders)))

    def prepare(self, tell: Tell = lambda _: None) -> RealRun:
        """Asks the training code what it needs and begins the run's folder, unless both was done before.

        `tell` gets a line about each job that is asked.
        """
        check_room(self._folder.path)
        described = self._described(tell)
        jobs = [complete(spec, described.get(spec.name), self.slots) for spec in self._checked.file.jobs]
        spec = begin(
            self._folder,
            RunSpec(
                kind="run",
                started_at_s=time.time(),
                command=myself().command,
                asked=self._checked.asked,
                slots=self.slots,
                usd_per_slot_hour=self._checked.file.machine.usd_per_slot_hour,
            ),
        )
        self._folder.write("described", {name: dataclasses.asdict(one) for name, one in described.items()})
        training = self._training(spec)
        return RealRun(
            folder=self._folder,
            policy=self._checked.policy,
            make=lambda: self._target.make(training, self._folder, wall_clock(spec.started_at_s)),
            nodes=training.nodes,
            source=Arrivals(jobs),
            seed=self._checked.request.seed,
            share_priors=True,
        )

    def start(self, run: RealRun, stop: Stop | None = None, observer: Observer | None = None) -> RunResult:
        """Starts or resumes the run and drives it until every job is over or `stop` is asked."""
        ended_by = drive(run, stop or Stop(), observer or NoObserver())
        if ended_by.is_final:
            self._folder.write("result", {"ended_by": str(ended_by)})
        return run_result(self._folder, ended_by)

    def _training(self, spec: RunSpec) -> TrainingSpec:
        request, jobs = self._checked.request, self._checked.file.jobs
        works = {job.name: job.work for job in jobs}
        begun = first_nodes(self._folder)
        return TrainingSpec(
            work=lambda job: works.get(job.id, jobs[0].work),
            slots=max(self.slots, spec.slots),
            nodes=self._target.held if begun is None else begun,
            seed=request.seed,
            retries=request.retries,
            tensorboard=request.tensorboard,
            runs_commands=any(isinstance(work, CommandLine) for work in works.values()),
        )

    def _described(self, tell: Tell) -> dict[str, Described]:
        """The jobs' descriptions by their training code; those from the start of a run that has begun."""
        folder, specs = self._folder, self._checked.file.jobs
        kept = folder.read("described") if folder.is_begun else None
        try:
            described = msgspec.convert(kept or {}, dict[str, Described])
        except msgspec.ValidationError as error:
            raise unreadable(folder.path / "described.json", f"is not as it was written: {error}.") from error
        unknown = [spec for spec in specs if isinstance(spec.work, Entry) and spec.name not in described]
        if unknown:
            described |= describe_entries(unknown, self._target, folder.failed_log, tell=tell)
        return described


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
    """Run the jobs of a file, or resume the run of this name, and return its result.

    `on` is "local" for this machine, or "ray" or "ray:ADDRESS". Files go to `folder`/`name`, checkpoints
    also to `store`, a path or URL that fsspec knows. With `in_folder` each command runs in a folder of its
    own. `progress`, such as print, is called with a line of text for every change. `yes` resumes a run with
    a damaged journal from before the damage.

    Ctrl-C or SIGTERM saves checkpoints, stops the run and raises KeyboardInterrupt. The same call resumes.
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
    progress = given_progress(progress)
    return earlier_run_result(checked) or _run(checked, progress, yes=given_flag(yes, "yes"))


def _run(checked: CheckedJobs, progress: Tell | None, *, yes: bool) -> RunResult:
    tell = progress or (lambda _: None)
    with checked.opened(yes=yes, tell=tell) as target:
        launch = JobsLaunch(checked, target)
        for note in launch.notes:
            tell(note)
        reported = partial(metrics_after, checked.folder)
        with interrupting() as stop, telling(progress, stop=stop, reported=reported) as observer:
            return launch.start(launch.prepare(tell), stop, observer)
