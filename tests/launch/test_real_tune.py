"""A study with real workers: trained, killed half-way, interrupted, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from live_processes import STRETTO
from stretto.core.events import CheckpointSaved, Event, JobReported
from stretto.runs.folder import RunFolder
from tune_world import STUDY, TRAIN

pytest.importorskip("torch")

WORDS = ("tune", "study.toml", "train.py:train", "--policy", "asha", "--json")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "study.toml").write_text(STUDY.replace("epoch_s = 10", "epoch_s = 0.1"))
    yield tmp_path
    assert processes_of(tmp_path) == []


def begin(here: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STRETTO, *words],
        cwd=here,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(here: Path, *words: str) -> dict[str, Any]:
    with begin(here, *words) as run:
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def wait_for(here: Path, enough: Callable[[list[Event]], bool], run: subprocess.Popen[str]) -> list[Event]:
    """What the journal holds once it is enough."""
    folder = RunFolder(here / "runs" / "tiny")
    while run.poll() is None:
        events = list(folder.events())
        if enough(events):
            return events
        time.sleep(0.05)
    pytest.fail(f"the run ended before: {run.communicate()}")


def results(events: list[Event]) -> int:
    return sum(len(event.results) for event in events if isinstance(event, JobReported))


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that work in the folder, given a moment to go."""
    for _ in range(600):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if str(folder) in line:
                    found.append(line)
        if not found:
            break
        time.sleep(0.1)
    return found


def test_killed_half_way_the_same_command_resumes(here: Path) -> None:
    (here / "slow").touch()
    with begin(here, *WORDS) as run:
        before = wait_for(here, lambda events: results(events) >= 5, run)
        run.kill()
    assert run.returncode == -signal.SIGKILL
    (here / "slow").unlink()
    found = finish(here, *WORDS)
    assert found["ended_by"] == "jobs"
    assert found["best_metric"] > 0.5
    assert Path(found["checkpoint"]).is_absolute()
    assert Path(found["checkpoint"]).is_file()
    events = list(RunFolder(here / "runs" / "tiny").events())
    assert events[: len(before)] == before
    told = [
        (event.job_id, one.epoch)
        for event in events
        if isinstance(event, JobReported)
        for one in event.results
    ]
    assert len(told) == len(set(told))
    assert max(epoch for _, epoch in told) == 8
    assert finish(here, *WORDS) == found


def test_ctrl_c_saves_and_stops_and_the_same_command_resumes(here: Path) -> None:
    (here / "slow").touch()
    with begin(here, *WORDS) as run:
        wait_for(here, lambda events: results(events) >= 3, run)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=300)
    assert run.returncode == 1
    assert json.loads(out)["ended_by"] == "request"
    assert "resume with: stretto tune study.toml train.py:train" in err
    saved = [one for one in RunFolder(here / "runs" / "tiny").events() if isinstance(one, CheckpointSaved)]
    assert saved
    assert processes_of(here) == []
    (here / "slow").unlink()
    assert finish(here, *WORDS)["ended_by"] == "jobs"


def test_a_metric_that_is_never_reported_is_told_at_once(here: Path) -> None:
    text = (here / "study.toml").read_text()
    (here / "study.toml").write_text(text.replace('metric = "accuracy"', 'metric = "top5"'))
    with begin(here, *WORDS) as run:
        _, err = run.communicate(timeout=300)
    assert run.returncode == 2
    assert "'top5' is never reported; what is reported is accuracy" in err
    assert "Traceback" not in err
