"""The Python functions: what a call got wrong, and what Ctrl-C does to who calls."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto
from stretto.core.errors import InputError
from stretto.core.events import RunPaused
from stretto.driving.drive import Observer
from stretto.driving.local_target import ThisMachine
from stretto.driving.stop import Stop
from stretto.inputs.arguments import given_options, given_whole
from stretto.inputs.study import EXAMPLE_STUDY, parse_study
from stretto.launch.tune import PreparedStudy, StudyLaunch
from stretto.policies import registry
from stretto.runs.folder import find_run
from stretto.runs.results import TuneResult
from stretto.worlds.synthetic import demo_workload
from tune_world import simulated, write_study

UNTYPED: Any = stretto
RUN: Callable[..., Any] = stretto.run
TUNE: Callable[..., Any] = stretto.tune
STUDY = parse_study(EXAMPLE_STUDY, Path("study.toml"))
TOY = stretto.load_curves("builtin:toy")
JOBS = '[[job]]\nname = "a"\nepochs = 1\ncommand = [{words}]\n'


def train(config: object, run: object) -> None:
    """A training function that somebody may hand over as it is."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    (tmp_path / "jobs.toml").write_text(JOBS.format(words=f'"{sys.executable}"'), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("function", [RUN, TUNE])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"slots": "two"}, "slots: 'two' is no whole number"),
        ({"slots": True}, "slots: True is no whole number"),
        ({"slots": 1.5}, "slots: 1.5 is no whole number"),
        ({"slots": -1}, "-1 slots are out of range. Give 1 to"),
        ({"policy": None}, "policy: None is no text"),
        ({"policy": "polux"}, "Did you mean pollux"),
        ({"options": "p=1"}, "options: 'p=1' does not name options"),
        ({"options": {"p": [1]}}, "options: p: [1] is no value"),
        ({"options": {1: "1"}}, "options: 1 is no text"),
        ({"on": 1}, "on: 1 is no text"),
        ({"on": "mars"}, "'mars' is no place to train"),
        ({"store": None}, "store: None is no text"),
        ({"name": 3}, "name: 3 is no text"),
        ({"folder": None}, "folder: None is no path"),
        ({"seed": "x"}, "seed: 'x' is no whole number"),
        ({"retries": None}, "retries: None is no whole number"),
        ({"retries": -1}, "-1 retries are less than none"),
        ({"progress": "print"}, "progress: 'print' cannot be called"),
        ({"tensorboard": "no"}, "tensorboard: 'no' is neither True nor False"),
    ],
)
def test_a_wrong_argument_is_told_by_value_rule_and_remedy(
    function: Callable[..., Any], given: dict[str, object], told: str
) -> None:
    words = ("jobs.toml",) if function is RUN else ("study.toml", "train.py:train")
    with pytest.raises(InputError) as caught:
        function(*words, **given)
    assert told in str(caught.value)
    assert caught.value.remedy
    assert "--" not in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize("jobs", [{"job": []}, None, 3])
def test_jobs_are_in_a_file(jobs: object) -> None:
    with pytest.raises(InputError, match=r"jobs: .* is no path\. Give one such as 'jobs\.toml'"):
        RUN(jobs)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: UNTYPED.plan("study.toml"), r"study: 'study\.toml' is no StudyFile\. Give read_study"),
        (lambda: UNTYPED.plan(STUDY, planner="luck"), r"there is no planner 'luck'\. There are search"),
        (lambda: UNTYPED.plan(STUDY, rule="hope"), r"there is no rule 'hope'\. There are quantile"),
        (lambda: UNTYPED.plan(STUDY, seed="x"), "seed: 'x' is no whole number"),
        (lambda: UNTYPED.simulate_study(STUDY, "builtin:toy", "asha"), r"Give load_curves\('builtin:toy'\)"),
        (lambda: UNTYPED.simulate_study(STUDY, TOY, 3), "policy: 3 is no text"),
        (lambda: UNTYPED.simulate_study(STUDY, TOY, "asha", seed=0.5), "seed: 0.5 is no whole number"),
        (lambda: UNTYPED.simulate("trace.csv", "pollux"), "workload: 'trace.csv' is no workload"),
        (lambda: UNTYPED.simulate(demo_workload(), "pollux", {}), "setup: {} is no Setup"),
        (lambda: UNTYPED.decide({}, "pollux"), "view: {} is no ClusterView"),
        (lambda: UNTYPED.load_curves(3), "curves 3 are of no known kind"),
        (lambda: UNTYPED.read_study(None), "path: None is no path"),
        (lambda: UNTYPED.read_snapshot({}), "path: {} is no path"),
    ],
)
def test_what_other_functions_cannot_take_is_told_too(call: Callable[[], object], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        call()
    assert caught.value.remedy


@pytest.mark.parametrize("interval_s", ["1m", True, [1]])
def test_an_interval_is_in_seconds(interval_s: object) -> None:
    with pytest.raises(InputError, match=r"interval_s: .* is no number\. Give seconds"):
        RUN("jobs.toml", interval_s=interval_s)


@pytest.mark.parametrize("policy", ["rubberband", "asha"])
def test_a_policy_for_studies_is_refused_with_those_for_jobs(policy: str) -> None:
    with pytest.raises(InputError, match="For jobs there are pollux") as caught:
        RUN("jobs.toml", policy=policy)
    assert "Name one" not in caught.value.remedy


def test_a_function_is_given_by_its_name() -> None:
    with pytest.raises(InputError, match="neither the name of a training function nor a command") as caught:
        TUNE("study.toml", train)
    assert f'Give "{__file__}:train"' in caught.value.remedy
    for hidden in (lambda *_: None, os.getpid):
        with pytest.raises(InputError, match=r'top level of a file and give "train\.py:train"'):
            TUNE("study.toml", hidden)
    with pytest.raises(InputError, match="work: 1 is no text"):
        TUNE("study.toml", ["python", 1])


def test_options_and_numbers_are_taken_as_they_are_meant() -> None:
    assert given_options({"p": -1.0, "interference": True, "max_nodes": "3"}) == {
        "p": "-1.0",
        "interference": "true",
        "max_nodes": "3",
    }
    assert given_whole(np.int64(2), "slots") == 2


@pytest.mark.processes
def test_ctrl_c_saves_the_run_and_then_interrupts_who_called(here: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    code = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGINT)}); time.sleep(60)"
    words = ", ".join(f"'{word}'" for word in (sys.executable, "-c", code))
    (here / "jobs.toml").write_text(JOBS.format(words=words), encoding="utf-8")
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        stretto.run("jobs.toml", slots=1, name="first", policy="fifo", progress=told.append)
    *_, last = find_run("first").events()
    assert isinstance(last, RunPaused)
    assert any("a started" in line for line in told), told
    assert any("stopping" in line for line in told), told


def test_a_study_is_told_and_interrupted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_to_stop = False

    launch_start = StudyLaunch.start

    def start(launch: StudyLaunch, prepared: PreparedStudy, stop: Stop, observer: Observer) -> TuneResult:
        result = launch_start(launch, prepared, stop, observer)
        if asked_to_stop:
            stop.ask()
        return result

    monkeypatch.setattr(ThisMachine, "make", lambda _, *given: simulated(*given))
    monkeypatch.setattr(StudyLaunch, "start", start)
    told: list[str] = []
    result = stretto.tune("study.toml", "train.py:train", policy="asha", progress=told.append)
    assert any(f"{result.best_trial} has the best accuracy" in line for line in told), told
    asked_to_stop = True
    with pytest.raises(KeyboardInterrupt):
        stretto.tune("study.toml", "train.py:train", policy="asha", name="other")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the target was opened and a policy built."""
    counts: Counter[str] = Counter()

    def counting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            counts[what] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(ThisMachine, "opened", counting("opened", ThisMachine.opened))
    monkeypatch.setattr(registry, "checked_policy", counting("built", registry.checked_policy))
    return counts


def test_a_tune_opens_its_target_once_and_builds_its_policy_once(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
) -> None:
    monkeypatch.setattr(ThisMachine, "make", lambda _, *given: simulated(*given))
    result = stretto.tune("study.toml", "train.py:train", policy="rubberband", progress=lambda _: None)
    assert result.succeeded
    assert counted == {"opened": 1, "built": 1}


@pytest.mark.processes
def test_a_run_opens_its_target_once_and_builds_its_policy_once(here: Path, counted: Counter[str]) -> None:
    (here / "train.py").write_text("print('{\"epoch\": 1}')\n", encoding="utf-8")
    words = f'"{sys.executable}", "train.py"'
    (here / "jobs.toml").write_text(JOBS.format(words=words), encoding="utf-8")
    assert stretto.run("jobs.toml", policy="fifo", slots=1, progress=lambda _: None).succeeded
    assert counted == {"opened": 1, "built": 1}
