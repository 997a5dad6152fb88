"""What can go wrong, as a tree.

StrettoError
├── InputError      what a user wrote: a file, a flag, an option (exit code 2)
├── PolicyError     a policy broke its contract (a bug in the policy)
└── JournalError    the record of a run cannot be read, or is not of this run
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LONGEST_WORD = 300
"""Characters; a longer one is shown by its beginning and its end."""


class StrettoError(Exception):
    """Base of everything Stretto raises on purpose; what it says can be printed whatever a file has in it."""

    def __init__(self, message: str) -> None:
        super().__init__(readable(message))


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


def readable(text: str) -> str:
    """Words of a file as they can be shown: nothing that a terminal cannot print, and no endless word."""
    if text.isprintable() and len(text) <= _LONGEST_WORD:
        return text
    shown = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)
    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", _shortened, shown)


def _shortened(word: re.Match[str]) -> str:
    kept = _LONGEST_WORD // 3
    return f"{word[0][:kept]}..({len(word[0])} characters)..{word[0][-kept:]}"


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """The beginning of a remedy for a word that is not known; empty if none is like it."""
    close = difflib.get_close_matches(word, list(known), n=most)
    return f"Did you mean {' or '.join(close)}? " if close else ""
