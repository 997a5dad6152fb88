"""The deadline of a study: what was given, and what had passed of it when the run began."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stretto.core.units import parse_duration_s
from stretto.runs.folder import PastLimits, RunSpec, Tables

NOTABLE_S = 1.0
DAY_S = 86400.0
FAR_S = 366 * DAY_S
"""A deadline that is further away is not worth a word."""
TYPING_S = 60.0
"""From when a deadline is proposed until it is given, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a study was to be over."""

    given_s: float
    """As it was given; of a time of day, how long after the first start it was."""
    measuring_s: float = 0.0
    """What measuring and planning had taken of it before the first start."""
    time_of_day: str = ""
    """As it was written; empty if it was given as a duration."""

    @property
    def after_s(self) -> float:
        """From the first start."""
        return self.given_s - self.measuring_s

    @property
    def is_cut(self) -> bool:
        """Whether what was taken of it is worth a word."""
        return self.measuring_s >= NOTABLE_S


def deadline_of(spec: RunSpec) -> Deadline | None:
    """That of a study; None if it has none."""
    if spec.deadline_s is None:
        return None
    duration_s = given_duration_s(spec.asked)
    if duration_s is None:
        return Deadline(given_s=spec.deadline_s, time_of_day=_words(spec.asked))
    given_s = max(duration_s, spec.deadline_s)
    return Deadline(given_s=given_s, measuring_s=given_s - spec.deadline_s)


def enough_after(gone_s: float) -> str:
    """A deadline, as people write it, that is still to come when somebody has read this and typed it."""
    hours, minutes = divmod(math.ceil((gone_s + TYPING_S) / 60.0), 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m"


def when_to_resume(spec: RunSpec, now_s: float) -> str:
    """Until when a run that was stopped goes on as it is, in a sentence; empty if its deadline is no matter.

    `now_s` is on the wall clock.
    """
    left_s = left_until_s(spec, now_s)
    if not 0.0 < left_s <= FAR_S:
        return ""
    due = datetime.fromtimestamp(math.floor(now_s + left_s)).astimezone()
    at = due.strftime("%H:%M:%S" if left_s < DAY_S else "%Y-%m-%d %H:%M:%S")
    return f"Resume before {at}, or with a later --deadline."


def what_lets_go_on(spec: RunSpec, ended_by: str, now_s: float) -> str:
    """Which larger limit lets a run go on that a limit has ended, as a clause; empty of any other."""
    if ended_by == EndedBy.BUDGET:
        return "its budget is spent; a larger --budget lets it go on"
    deadline = deadline_of(spec)
    if ended_by != EndedBy.DEADLINE or deadline is None:
        return ""
    enough = enough_after(now_s - spec.started_at_s + deadline.measuring_s)
    return f"its deadline has passed; a later --deadline lets it go on, such as --deadline {enough}"


def left_until_s(spec: RunSpec, now_s: float) -> float:
    """Seconds until a run's deadline; 0 or less once it has come."""
    return math.inf if spec.deadline_s is None else spec.started_at_s + spec.deadline_s - now_s


def given_duration_s(asked: Tables) -> float | None:
    """A deadline that was given as a duration; None of a time of day, or if there is none."""
    words = _words(asked)
    return None if not words or ":" in words or words.lower() == "none" else parse_duration_s(words)


def _words(asked: Tables) -> str:
    """The deadline as it was written, in the command or in the study's file; empty if it was not."""
    words = asked["deadline"] or asked["study"].get("limits", {}).get("deadline")
    return "" if words is None else str(words).strip()


def is_at_deadline(t_s: float, past_limits: Iterable[PastLimits]) -> bool:
    """Whether a run that has a later deadline by now was over by the one it had at a time."""
    then = next((limits for limits in past_limits if t_s <= limits.until_s), None)
    return then is not None and then.deadline_s is not None and t_s >= then.deadline_s


class AtDeadline(StrEnum):
    """What running trials do when the deadline comes."""

    STOP = "stop"
    """Save at the next step, and stop."""
    FINISH_EPOCH = "finish-epoch"
    """Go on to the end of their epoch."""


class EndedBy(StrEnum):
    """Why a run is over, or not going on."""

    JOBS = "jobs"
    """Every job came to its end."""
    DEADLINE = "deadline"
    BUDGET = "budget"
    STALLED = "stalled"
    """Jobs are left that the policy, asked again and again, does not start."""
    REQUEST = "request"
    """Somebody asked it to stop."""

    @property
    def for_good(self) -> bool:
        """Whether there is nothing to resume."""
        return self in {EndedBy.JOBS, EndedBy.DEADLINE, EndedBy.BUDGET}
