"""Launches a run step by step, on substrates that a test makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from stretto.driving.drive import Observer, RealSubstrate
from stretto.driving.local_target import ThisMachine
from stretto.driving.request import CheckedStudy, TuneRequest
from stretto.driving.stop import Stop
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import OpenTarget
from stretto.launch.describe import describe_entries
from stretto.launch.jobs import CheckedJobs, JobsLaunch
from stretto.launch.to_plan import PlannableStudy, study_to_plan
from stretto.launch.tune import PreparedStudy, StudyLaunch, earlier_result
from stretto.profiling.probe_data import OnProgress
from stretto.runs.folder import RunFolder
from stretto.runs.job_results import RunResult
from stretto.runs.results import TuneResult
from stretto.wire.messages import Described

MakeSubstrate = Callable[[TrainingSpec, RunFolder, Callable[[], float]], RealSubstrate]


class MadeBy:
    """An open target whose substrates a test makes."""

    def __init__(self, target: OpenTarget, make: MakeSubstrate) -> None:
        self._target = target
        self.make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def look_again(self) -> OpenTarget:
        return on(self._target.look_again(), self.make)


def on(target: OpenTarget, make: MakeSubstrate | None) -> OpenTarget:
    return target if make is None else MadeBy(target, make)


def prepare(
    checked: CheckedStudy, *, make: MakeSubstrate | None = None, on_progress: OnProgress = lambda _: None
) -> PreparedStudy:
    with checked.opened() as target:
        return StudyLaunch(checked, on(target, make)).prepare(on_progress)


def start(
    prepared: PreparedStudy,
    *,
    stop: Stop | None = None,
    observer: Observer | None = None,
    make: MakeSubstrate | None = None,
) -> TuneResult:
    with prepared.checked.opened() as target:
        return StudyLaunch(prepared.checked, on(target, make)).start(prepared, stop, observer)


def finished(checked: CheckedStudy) -> TuneResult | None:
    return earlier_result(checked, lambda _: None)


def start_run(
    checked: CheckedJobs,
    *,
    make: MakeSubstrate | None = None,
    describe: Callable[..., dict[str, Described]] = describe_entries,
    on_begun: Callable[[], None] = lambda: None,
) -> RunResult:
    """Runs jobs whose training code is described by the test."""
    with mock.patch("stretto.launch.jobs.describe_entries", describe), checked.opened() as target:
        launch = JobsLaunch(checked, on(target, make))
        run = launch.prepare()
        on_begun()
        return launch.start(run)


def planned(
    request: TuneRequest, on_progress: OnProgress = lambda _: None, *, make: MakeSubstrate | None = None
) -> PlannableStudy:
    """The study to plan, measured on this machine with a substrate that the test makes."""
    if make is None:
        return study_to_plan(request, on_progress)
    with mock.patch.object(ThisMachine, "make", lambda _, *given: make(*given)):
        return study_to_plan(request, on_progress)
