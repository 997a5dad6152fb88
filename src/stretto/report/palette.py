"""One colour per policy and per application, the same on a whole page; safe for colour-blind eyes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.policies.registry import BUILT_IN
from stretto.worlds.catalogue import builtin_catalogue

# Okabe and Ito's set without its yellow, which is too light for lines on white.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C564B")
_DASHES = ("solid", "6px,3px", "2px,3px", "9px,3px,2px,3px")
# Tol's muted set, dark and light in turn, so that neighbours differ.
_FILLS = (
    "#332288",
    "#44AA99",
    "#CC6677",
    "#DDCC77",
    "#117733",
    "#88CCEE",
    "#882255",
    "#999933",
    "#AA4499",
)


@dataclass(frozen=True, slots=True)
class LineStyle:
    colour: str
    dash: str


@dataclass(frozen=True, slots=True)
class Palette:
    policies: tuple[str, ...]
    applications: tuple[str, ...]

    @staticmethod
    def of(policies: Iterable[str], applications: Iterable[str]) -> Palette:
        """Those that are built in come first: they look the same on every page."""
        return Palette(
            tuple(dict.fromkeys([*BUILT_IN, *policies])),
            tuple(dict.fromkeys([*sorted(builtin_catalogue().entries), *sorted(applications)])),
        )

    def policy(self, name: str) -> LineStyle:
        return line_style(self.policies.index(name))

    def application(self, name: str, shade: int = 0) -> str:
        """The application's colour; jobs of one application differ in shade (0, 1 or 2)."""
        turn, index = divmod(self.applications.index(name), len(_FILLS))
        return lighter(_FILLS[index], min(0.4 * (turn % 2) + 0.16 * shade, 0.7))


def line_style(index: int) -> LineStyle:
    # Each round of colours begins with another dash, so that no two of 32 look alike.
    turn = index // len(_LINES)
    return LineStyle(_LINES[index % len(_LINES)], _DASHES[(index + turn) % len(_DASHES)])


def ramp(count: int) -> list[str]:
    """Colours for ordered lines, light to dark blue."""
    return [lighter("#08306B", 0.62 * (1 - i / max(count - 1, 1))) for i in range(count)]


def lighter(colour: str, share: float) -> str:
    """Mixed with white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
