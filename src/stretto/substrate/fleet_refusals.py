"""Whether any node can be hoped for, where all that were asked for have been refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.core.events import NodeRefused

HOPELESS = 6
"""Times in a row that everything is refused alike before nothing is hoped for.

How far apart they are is up to whoever wishes: what may pass by itself has as long as that takes.
"""
_CUT = "\N{HORIZONTAL ELLIPSIS}"
"""Begins a word before which something was cut off, which may be a part of that word."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """How often in a row nothing came of anything that was asked for, since a run began."""

    times: int = 0
    instance: str = ""
    why: str = ""
    """The last time."""
    last_s: float | None = None
    """When that was."""
    came: bool = False
    """Some node did: it can be done, so that it is worth waiting for another, and nothing is counted."""

    @property
    def hopeless(self) -> bool:
        return self.times >= HOPELESS

    def arrived(self) -> Refusals:
        return Refusals(came=True)

    def with_one_more_try(self) -> Refusals:
        """Of a run that goes on: something may have been mended."""
        return replace(self, times=min(self.times, HOPELESS - 1))

    def after(self, refused: NodeRefused, *, awaits: bool) -> Refusals:
        """Those of one moment count once, and not while one still `awaits` others."""
        if awaits or self.came or refused.t_s == self.last_s:
            return self
        alike = refused.instance == self.instance and _are_alike(refused.why, self.why)
        times = self.times + 1 if alike else 1
        return Refusals(times, refused.instance, refused.why, refused.t_s)


def end_of(text: str, letters: int) -> str:
    """The last words of a text, about so many letters; if some are left out, that shows."""
    words = " ".join(text.split())
    if len(words) <= letters:
        return words
    end = words[-letters:]
    _, space, whole = end.partition(" ")
    return f"{_CUT} {whole}" if space else f"{_CUT}{end}"


def _are_alike(why: str, other: str) -> bool:
    """Whether they may say the same, where only the end of what was said is known."""
    (head, tail), (other_head, other_tail) = _gist(why), _gist(other)
    if tail is None or other_tail is None:
        return _has(head, other_head, other_tail) if tail is None else _has(other_head, head, tail)
    shared = min(len(tail), len(other_tail))
    return head == other_head and tail[len(tail) - shared :] == other_tail[len(other_tail) - shared :]


def _has(words: list[str], head: list[str], tail: list[str] | None) -> bool:
    """Whether they begin and end so; without a tail, are so."""
    if tail is None:
        return words == head
    rest = words[len(head) :]
    return words[: len(head)] == head and len(rest) >= len(tail) and rest[len(rest) - len(tail) :] == tail


def _gist(why: str) -> tuple[list[str], list[str] | None]:
    """The words before what was cut off, and those after; None: nothing was.

    Without words that have digits: names of nodes, times and ids differ from one time to the next.
    """
    head: list[str] = []
    tail: list[str] | None = None
    for word in why.split():
        if word.startswith(_CUT):
            tail = []
        elif not any(letter.isdigit() for letter in word):
            (head if tail is None else tail).append(word)
    return head, tail
