"""Failures in words."""

from __future__ import annotations

from stretto.report.failures import MOST_SHOWN, failure_lines


def error(text: str, job_id: str) -> tuple[str, str]:
    return job_id, f"Traceback\n{text}\n\nlog: runs/x/jobs/{job_id}/stdout.log\n"


def test_what_is_the_same_is_said_once() -> None:
    told = "\n".join(failure_lines(error("ValueError: boom", f"trial-{number:03d}") for number in range(12)))
    assert told.count("ValueError: boom") == 1
    assert "trial-000 failed: Traceback" in told
    assert "jobs/trial-000/stdout.log" in told
    assert "The same in trial-001, trial-002, trial-003, trial-004, trial-005 and 6 more." in told


def test_a_few_different_ones_are_told_and_the_others_named() -> None:
    told = "\n".join(failure_lines(error(f"ValueError: {number}", f"t{number}") for number in range(5)))
    assert told.count("ValueError") == MOST_SHOWN
    assert "Others failed otherwise: t3, t4." in told


def test_nothing_failed() -> None:
    assert not list(failure_lines([]))
