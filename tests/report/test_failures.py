"""Failures in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from process_bench import PYTHON, CommandWorkers, all_events, job_of, start
from stretto.core.errors import last_line
from stretto.core.events import JobFailed
from stretto.report.run_text import MOST_SHOWN, failure_lines
from stretto.runs.results import TrialResult
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.effects import Rules


def failed(error: str, job_id: str, log: str = "") -> TrialResult:
    return TrialResult(
        id=job_id,
        config={},
        state="failed",
        epochs=0,
        best_metric=None,
        retries=0,
        error=error,
        log=Path(log or f"runs/x/jobs/{job_id}/stdout.log"),
        checkpoint=None,
    )


def test_what_is_the_same_is_said_once() -> None:
    told = "\n".join(
        failure_lines(failed("Traceback\nValueError: boom\n", f"trial-{number:03d}") for number in range(12))
    )
    assert told.count("ValueError: boom") == 1
    assert "trial-000 failed: Traceback" in told
    assert "jobs/trial-000/stdout.log" in told
    assert "The same in trial-001, trial-002, trial-003, trial-004, trial-005 and 6 more." in told


@pytest.mark.processes
@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "print('so far so good'); 1 / 0"])
def test_commands_that_fail_alike_are_seen_to(tmp_path: Path, code: str) -> None:
    ended = []
    for job_id in ("a", "b"):
        command = Command((*PYTHON, "-c", code))
        substrate = CommandWorkers({job_id: command}, tmp_path, rules=Rules(retries=0))
        substrate.admit(job_of(job_id))
        substrate.apply([start(job_id)])
        (event,) = all_events(substrate)
        substrate.close()
        assert isinstance(event, JobFailed)
        ended.append(failed(event.error, job_id, event.log))
    told = "\n".join(failure_lines(ended))
    assert "The same in b." in told
    assert str(tmp_path / "jobs/a/stdout.log") in told
    assert len({last_line(one.error) for one in ended}) == 1


def test_a_few_different_ones_are_told_and_the_others_named() -> None:
    told = "\n".join(failure_lines(failed(f"ValueError: {number}", f"t{number}") for number in range(5)))
    assert told.count("ValueError") == MOST_SHOWN
    assert "Other errors: t3, t4." in told


def test_nothing_failed() -> None:
    assert not list(failure_lines([]))
