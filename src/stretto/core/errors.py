"""The errors that Stretto raises.

StrettoError
├── InputError      what a user wrote: a file, a flag, an option (exit code 2)
├── PolicyError     a policy broke its contract (a bug in the policy)
└── JournalError    the journal of a run cannot be read, or belongs to another run
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LONGEST_WORD = 300
"""In characters; of a longer word only the beginning and the end are shown."""


class StrettoError(Exception):
    """Base class of Stretto's errors. The message is made printable, as it may quote the content of files."""

    def __init__(self, message: str) -> None:
        super().__init__(readable(message))


class InputError(StrettoError):
    """An error in what a user wrote: where it is, the problem with the rule it breaks, and the remedy.

    `log` is the log of a training run that failed.
    """

    def __init__(self, problem: str, *, where: str = "", remedy: str = "", log: str = "") -> None:
        self.problem = problem
        self.where = where
        self.remedy = remedy
        self.log = log
        said = ": ".join(part for part in (where, problem) if part) + (f" {remedy}" if remedy else "")
        super().__init__(with_log(said, log))


class PolicyError(StrettoError):
    """A policy made a mistake: it raised, or returned a decision that is impossible or lacks reasons."""

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        self.problem = problem
        super().__init__(f"{problem} {remedy}" if remedy else problem)


class JournalError(StrettoError):
    """The journal on disk cannot be continued."""


def with_log(text: str, log: str) -> str:
    """The text, and in a line of its own the path of a log, if there is one."""
    return f"{text.rstrip()}\nlog: {log}" if log else text


def last_line(text: str) -> str:
    """The last line of a traceback."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def readable(text: str) -> str:
    """Text with unprintable characters escaped and very long words shortened."""
    if text.isprintable() and len(text) <= _LONGEST_WORD:
        return text
    shown = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)
    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", _shortened, shown)


def _shortened(word: re.Match[str]) -> str:
    kept = _LONGEST_WORD // 3
    return f"{word[0][:kept]}..({len(word[0])} characters)..{word[0][-kept:]}"


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """The beginning of a remedy for an unknown word; empty if no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=most)
    return f"Did you mean {' or '.join(close)}? " if close else ""
