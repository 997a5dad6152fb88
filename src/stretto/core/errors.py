"""What can go wrong, as a tree.

StrettoError
├── InputError      what a user wrote: a file, a flag, an option (exit code 2)
├── PolicyError     a policy broke its contract (a bug in the policy)
└── JournalError    the record of a run cannot be read, or is not of this run
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StrettoError(Exception):
    """Base of everything Stretto raises on purpose."""


class InputError(StrettoError):
    """Something a user wrote is wrong: says where, what, the rule it breaks, and the remedy."""

    def __init__(self, problem: str, *, where: str = "", remedy: str = "") -> None:
        self.problem = problem
        self.where = where
        self.remedy = remedy
        super().__init__(
            ": ".join(part for part in (where, problem) if part) + (f" {remedy}" if remedy else "")
        )


class PolicyError(StrettoError):
    """A policy returned a decision that no cluster could carry out, or one it does not explain."""


class JournalError(StrettoError):
    """The journal on disk cannot be continued."""


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """The beginning of a remedy for a word that is not known; empty if none is like it."""
    close = difflib.get_close_matches(word, list(known), n=most)
    return f"Did you mean {' or '.join(close)}? " if close else ""
