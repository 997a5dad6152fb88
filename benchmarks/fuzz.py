"""Figure: 50,000 damaged files and lines, read in process, and 500 by commands, without a single traceback.

We damage snapshots, studies, files of jobs, CSV tables, checkpoints' meta.json, journals, the output of
commands, and the other files of a run. The damage: wrong types, missing and doubled keys, numbers that are
huge, tiny or missing, nesting of 100,000, text that no terminal can print, flipped bits, cut ends.

A user's file must be refused with an error message, or be shown. A file that we wrote must be reported as
damaged, or have its original content. Without --full a tenth is tried. A single problem fails the figure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import TEST_HELPERS, verdict

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path += TEST_HELPERS
from fuzz_inputs import Kind, fuzz

NUMBERS = {
    Kind.SNAPSHOT: 9000,
    Kind.TOML: 9000,
    Kind.CSV: 11000,
    Kind.META: 6000,
    Kind.JOURNAL: 6000,
    Kind.LINES: 6000,
    Kind.OTHERS: 3000,
}
COMMANDS = {
    Kind.SNAPSHOT: 90,
    Kind.TOML: 120,
    Kind.CSV: 90,
    Kind.META: 50,
    Kind.JOURNAL: 60,
    Kind.LINES: 50,
    Kind.OTHERS: 40,
}
SHORT = 10
"""The short form divides the number of inputs by this."""
AT_ONCE = 2
PIECE = 250
"""Files that one process reads in a row."""


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    commands: bool
    number: int
    seed: int
    keep: Path | None


@dataclass(frozen=True, slots=True)
class Read:
    """The outcome of one piece."""

    kind: Kind
    commands: bool
    number: int
    refused: int
    problems: tuple[str, ...]


def read(piece: Piece) -> Read:
    """Reads the files of a piece, and keeps those with a problem."""
    refused, problems = 0, []
    with tempfile.TemporaryDirectory(prefix="stretto-fuzz-") as folder:
        for data, tried in fuzz(
            piece.kind, piece.number, piece.seed, folder=Path(folder), commands=piece.commands
        ):
            refused += tried.refused
            if tried.problem:
                problems.append(f"{piece.kind}, {_kept(data, piece.keep)}: {tried.problem}")
    return Read(piece.kind, piece.commands, piece.number, refused, tuple(problems))


def _kept(data: bytes, keep: Path | None) -> str:
    name = hashlib.sha256(data).hexdigest()[:12]
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / name).write_bytes(data)
    return name


def pieces(numbers: dict[Kind, int], seed: int, keep: Path | None, *, commands: bool) -> list[Piece]:
    size = PIECE if not commands else 10
    return [
        Piece(kind, commands, min(size, number - first), seed * 1_000_000 + first, keep)
        for kind, number in numbers.items()
        for first in range(0, number, size)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="leave files that came to a problem in this folder")
    given = parser.parse_args()
    share = 1 if given.full else SHORT
    numbers = {kind: number // share for kind, number in NUMBERS.items()}
    commands = {kind: number // share for kind, number in COMMANDS.items()}
    began_s = time.monotonic()
    with ProcessPoolExecutor(AT_ONCE) as pool:
        todo = [
            *pieces(commands, given.seed, given.keep, commands=True),
            *pieces(numbers, given.seed, given.keep, commands=False),
        ]
        done = list(pool.map(read, todo))
    took_s = time.monotonic() - began_s
    print(f"Fuzz: {sum(numbers.values())} in process, {sum(commands.values())} by commands, {took_s:.0f} s")
    print(f"  {'files':44} {'in process':>10} {'refused':>8} {'by commands':>12} {'refused':>8}")
    for kind in Kind:
        inside = [one for one in done if one.kind is kind and not one.commands]
        outside = [one for one in done if one.kind is kind and one.commands]
        print(
            f"  {kind:44} {sum(one.number for one in inside):>10} {sum(one.refused for one in inside):>8} "
            f"{sum(one.number for one in outside):>12} {sum(one.refused for one in outside):>8}"
        )
    problems = [problem for one in done for problem in one.problems]
    _show(problems)
    print(f"  {len(problems)} problems, 0 wanted: {verdict(not problems)}")
    return int(bool(problems))


def _show(problems: list[str]) -> None:
    """One problem of each kind, with the number of similar ones."""
    like = {re.sub(r"[0-9a-f]{12}|\d+", "N", one.strip().splitlines()[-1])[:100]: one for one in problems}
    counts = Counter(re.sub(r"[0-9a-f]{12}|\d+", "N", one.strip().splitlines()[-1])[:100] for one in problems)
    for key, number in counts.most_common(20):
        print(f"  {number} like: {like[key]}")


if __name__ == "__main__":
    sys.exit(main())
