"""What is said of a job that was to save and leave, and did not."""

from __future__ import annotations

KILLED = "it did not save and leave in time and was killed"
FAILED = "while it left: "


def has_not_saved(note: str) -> bool:
    """Whether this is what was noted of a job."""
    return note.startswith((KILLED, FAILED))
