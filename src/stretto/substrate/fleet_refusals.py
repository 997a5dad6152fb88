"""Whether any node can be hoped for, where all that were asked for have been refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

HOPELESS = 6
"""Times in a row that everything is refused alike before nothing is hoped for.

With pauses of 5, 10, 20, 40 and 80 s between them, so that what passes in two and a half minutes may pass.
"""


@dataclass(frozen=True, slots=True)
class Refusals:
    """How often in a row nothing came of anything that was asked for, since a run began."""

    times: int = 0
    instance: str = ""
    why: str = ""
    """The last time."""
    came: bool = False
    """Some node did: it can be done, so that it is worth waiting for another."""

    @property
    def hopeless(self) -> bool:
        return self.times >= HOPELESS and not self.came

    def arrived(self) -> Refusals:
        return Refusals(came=True)

    def with_one_more_try(self) -> Refusals:
        """Of a run that goes on: something may have been mended."""
        return replace(self, times=min(self.times, HOPELESS - 1))

    def once_more(self, instance: str, why: str) -> Refusals:
        alike = instance == self.instance and _gist(why) == _gist(self.why)
        return replace(self, times=self.times + 1 if alike else 1, instance=instance, why=why)


def _gist(why: str) -> list[str]:
    """Without words that have digits: names of nodes, times and ids differ from one time to the next."""
    return [word for word in why.split() if not any(letter.isdigit() for letter in word)]
