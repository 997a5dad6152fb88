"""Notes about jobs that did not save and leave when asked, or that had not begun to train."""

from __future__ import annotations

KILLED = "it did not save and leave in time and was killed"


FAILED = "while it left: "


def has_not_saved(note: str) -> bool:
    """Whether the note says that a job left without saving."""
    return note.startswith((KILLED, FAILED))


IMPORTING = "the training code was still being imported"


BEFORE_ITS_LOOP = "the training function had not come to run.epochs() or run.steps()"


def had_not_begun(note: str) -> bool:
    """Whether the note says that a job had not begun to train."""
    return note.startswith((IMPORTING, BEFORE_ITS_LOOP))
