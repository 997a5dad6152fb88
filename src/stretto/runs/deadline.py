"""The deadline of a study, and why a run ended."""

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
"""A deadline further away than this is not mentioned."""
TYPING_S = 60.0
"""The least time to read a proposed deadline and type it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a study must be over."""

    given_s: float
    """The duration as given; for a time of day, the time from the first start until then."""
    measuring_s: float = 0.0
    """How much of it was spent on measuring and planning before the first start."""
    time_of_day: str = ""
    """The text of a time of day; empty if a duration was given."""

    @property
    def after_s(self) -> float:
        """Seconds from the first start."""
        return self.given_s - self.measuring_s

    @property
    def is_cut(self) -> bool:
        """Whether measuring took a noticeable part of it."""
        return self.measuring_s >= NOTABLE_S


def deadline_of(spec: RunSpec) -> Deadline | None:
    """The deadline of a run; None if it has none."""
    if spec.deadline_s is None:
        return None
    duration_s = given_duration_s(spec.asked)
    if duration_s is None:
        return Deadline(given_s=spec.deadline_s, time_of_day=_words(spec.asked))
    given_s = max(duration_s, spec.deadline_s)
    return Deadline(given_s=given_s, measuring_s=given_s - spec.deadline_s)


def enough_after(gone_s: float) -> str:
    """A deadline such as 1h30m that will still be ahead once the user has typed it."""
    hours, minutes = divmod(math.ceil((gone_s + TYPING_S) / 60.0), 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m"


def when_to_resume(spec: RunSpec, now_s: float) -> str:
    """The sentence that says until when a stopped run can be resumed; empty if its deadline does not matter.

    `now_s` is wall clock time.
    """
    left_s = left_until_s(spec, now_s)
    if not 0.0 < left_s <= FAR_S:
        return ""
    due = datetime.fromtimestamp(math.floor(now_s + left_s)).astimezone()
    at = due.strftime("%H:%M:%S" if left_s < DAY_S else "%Y-%m-%d %H:%M:%S")
    return f"Resume before {at}, or with a later --deadline."


def what_lets_go_on(spec: RunSpec, ended_by: str, now_s: float) -> str:
    """The clause that says which limit to raise to continue a run; empty if no limit ended it."""
    if ended_by == EndedBy.BUDGET:
        return "its budget is spent; to continue, give a larger --budget"
    deadline = deadline_of(spec)
    if ended_by != EndedBy.DEADLINE or deadline is None:
        return ""
    enough = enough_after(now_s - spec.started_at_s + deadline.measuring_s)
    return f"its deadline has passed; to continue, give a later one, such as --deadline {enough}"


def left_until_s(spec: RunSpec, now_s: float) -> float:
    """Seconds until a run's deadline; 0 or less once it has passed."""
    return math.inf if spec.deadline_s is None else spec.started_at_s + spec.deadline_s - now_s


def given_duration_s(asked: Tables) -> float | None:
    """The deadline if it was given as a duration; otherwise None."""
    words = _words(asked)
    return None if not words or ":" in words or words.lower() == "none" else parse_duration_s(words)


def _words(asked: Tables) -> str:
    """The text of the deadline, from the command line or the study file; empty without one."""
    words = asked["deadline"] or asked["study"].get("limits", {}).get("deadline")
    return "" if words is None else str(words).strip()


def is_at_deadline(t_s: float, past_limits: Iterable[PastLimits]) -> bool:
    """Whether a deadline that was raised later had passed at this time."""
    then = next((limits for limits in past_limits if t_s <= limits.until_s), None)
    return then is not None and then.deadline_s is not None and t_s >= then.deadline_s


class AtDeadline(StrEnum):
    """What running trials do at the deadline."""

    STOP = "stop"
    """Save at the next step and stop."""
    FINISH_EPOCH = "finish-epoch"
    """Train to the end of the epoch."""


class EndedBy(StrEnum):
    """Why a run ended or stopped."""

    JOBS = "jobs"
    """Every job ended."""
    DEADLINE = "deadline"
    BUDGET = "budget"
    STALLED = "stalled"
    """The policy starts none of the jobs that are left."""
    REQUEST = "request"
    """The user stopped it."""

    @property
    def is_final(self) -> bool:
        """Whether there is nothing to resume."""
        return self in {EndedBy.JOBS, EndedBy.DEADLINE, EndedBy.BUDGET}
