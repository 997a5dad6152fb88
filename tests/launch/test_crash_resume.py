"""Runs killed at random moments, again and again, and resumed: as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash_child import EPOCHS, process_jobs, sim_options, sim_setup, sim_workload
from live_processes import SUPPORT
from stretto.core.events import Event, JobFinished, JobReported, JobSubmitted
from stretto.journal.base import MemoryJournal
from stretto.journal.folds.history import history_of
from stretto.journal.sqlite import SqliteJournal
from stretto.simulation.jobs import simulate

CHILD = SUPPORT / "crash_child.py"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(CHILD), *arguments], stdout=subprocess.PIPE, text=True)


def kill_after(turns: int, delay_s: float, *arguments: str) -> bool:
    """SIGKILL to the run after so many turns of its loop and a moment more; False if it ended before."""
    with start(*arguments) as child:
        assert child.stdout is not None
        seen = sum(1 for _ in itertools.islice(child.stdout, turns))
        time.sleep(delay_s)
        child.kill()
    return seen == turns and child.returncode != 0


def finish(*arguments: str) -> None:
    with start(*arguments) as child:
        child.communicate(timeout=60)
    assert child.returncode == 0


def read(folder: Path) -> list[Event]:
    journal = SqliteJournal(folder / "journal", run="crash")
    events = list(journal.events())
    journal.close()
    return events


def running_in(folder: Path) -> list[str]:
    """Command lines of all live processes that mention the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(f"{entry.name} {line}")
    return found


@pytest.mark.parametrize(("policy", "kills"), [("tiresias", 5), ("pollux", 3)])
def test_a_simulation_killed_at_random_moments_is_the_same_simulation(
    policy: str, kills: int, tmp_path: Path
) -> None:
    moments = random.Random(policy)
    for _ in range(kills):
        turns, delay_s = moments.randrange(1, 9), moments.uniform(0.0, 0.02)
        assert kill_after(turns, delay_s, "simulate", str(tmp_path), policy), "it was over before the kill"
    partial = read(tmp_path)
    finish("simulate", str(tmp_path), policy)
    whole = MemoryJournal()
    run = simulate(sim_workload(), policy, sim_setup(), options=sim_options(policy), journal=whole)
    resumed = read(tmp_path)
    assert 0 < len(partial) < len(resumed)
    history = history_of(resumed)
    assert history.decisions == run.history.decisions
    assert {job_id: job.jct_s for job_id, job in history.jobs.items()} == {
        job_id: job.jct_s for job_id, job in run.history.jobs.items()
    }
    assert run.metrics.completed == run.metrics.jobs
    assert resumed == list(whole.events())


def test_real_jobs_survive_the_death_of_their_controller(tmp_path: Path) -> None:
    arguments = ("processes", str(tmp_path), "fifo")
    moments = random.Random(1)
    for _ in range(2):
        assert kill_after(moments.randrange(3, 7), moments.uniform(0.0, 0.05), *arguments)
    finish(*arguments)
    assert not running_in(tmp_path)
    events = read(tmp_path)
    jobs = [job.id for job in process_jobs()]
    assert sorted(event.job_id for event in events if isinstance(event, JobFinished)) == jobs
    assert [event.job.id for event in events if isinstance(event, JobSubmitted)] == jobs
    for job_id in jobs:
        # Every epoch was trained once: a stopped command saves its last one before it goes.
        epochs = [int(line) for line in (tmp_path / f"{job_id}.done").read_text().split()]
        assert epochs == list(range(1, EPOCHS + 1))
        reports = [event for event in events if isinstance(event, JobReported) and event.job_id == job_id]
        work = [report.work_done for report in reports]
        assert work == sorted(work)
        assert work[-1] == 10.0 * EPOCHS
    times_s = [event.t_s for event in events]
    assert times_s == sorted(times_s)
