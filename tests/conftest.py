"""Settings of all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair; a run that fails must fail again when it is repeated.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")

# A shell that starts the suite in the background makes it ignore Ctrl-C, and nohup makes it ignore hang-ups.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Commands name `python`, as users do, whose environment is active; here it may not be.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


REAL_ROOMS = frozenset({"elastic", "examples", "faults", "launch", "profiling", "ray", "torch"})
"""Their tests start processes or import torch; `make quick` leaves them out."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Where tests run side by side, a file stays together, and so do all that start Ray.

    Whoever asks for "the Ray cluster of this machine" must find the one it has started.
    """
    for item in items:
        room, file = item.path.parent.name, item.path.stem
        if room in REAL_ROOMS:
            item.add_marker(pytest.mark.processes)
        item.add_marker(pytest.mark.xdist_group("ray" if room == "ray" else file))


@pytest.fixture(autouse=True)
def _alone_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of tests beside this one are not spoken of."""
    monkeypatch.setattr("stretto.driving.local_target.live_runs", lambda: ())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test stands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests without the mark `processes` start none: that keeps `make quick` quick."""
    if request.node.get_closest_marker("processes") is not None:
        return

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("this test starts a process: mark it with @pytest.mark.processes")

    for module, name in ((os, "fork"), (os, "posix_spawn"), (subprocess, "_fork_exec")):
        monkeypatch.setattr(module, name, refuse)
