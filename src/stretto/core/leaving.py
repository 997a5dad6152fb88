"""What is noted of a job that did not save and leave when asked, or had not begun to train."""

from __future__ import annotations

KILLED = "it did not save and leave in time and was killed"


FAILED = "while it left: "


def has_not_saved(note: str) -> bool:
    """Whether this is what was noted of a job."""
    return note.startswith((KILLED, FAILED))


IMPORTING = "the training code was still being imported"


BEFORE_ITS_LOOP = "the training function had not come to run.epochs() or run.steps()"


def had_not_begun(note: str) -> bool:
    """Whether this was noted of a job that did not train yet."""
    return note.startswith((IMPORTING, BEFORE_ITS_LOOP))
