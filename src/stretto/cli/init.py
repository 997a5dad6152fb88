"""`stretto init`: writes an example file to start from."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stretto.core.errors import InputError
from stretto.inputs.jobs import EXAMPLE_JOBS
from stretto.inputs.study import EXAMPLE_STUDY
from stretto.report.text import one_line


class What(StrEnum):
    """The kinds of example files."""

    STUDY = "study"
    JOBS = "jobs"


EXAMPLES = {What.STUDY: EXAMPLE_STUDY, What.JOBS: EXAMPLE_JOBS}
NEXT = {What.STUDY: "plan", What.JOBS: "run"}
"""The command that reads the file."""


def init(
    what: Annotated[What, typer.Argument(help="What to write an example of.")],
    path: Annotated[
        Path | None, typer.Argument(help="Where to write it.", show_default="study.toml or jobs.toml")
    ] = None,
) -> None:
    """Write an example file in which every field is explained.

    Example: [bold]stretto init study && stretto plan study.toml --deadline 2h[/bold]
    """
    path = path or Path(f"{what}.toml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_example(what, path))
    except FileExistsError as error:
        raise InputError(
            f"{path} exists already and is not overwritten.", remedy="Name another file."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}.", remedy="Name another file."
        ) from error
    print(f"wrote {path}; next: stretto {NEXT[what]} {shlex.quote(str(path))}")


def _example(what: What, path: Path) -> str:
    """The example, with the names of its file and of its run in the comments."""
    named = EXAMPLES[what].replace(f"{what}.toml", one_line(shlex.quote(str(path))))
    return named.replace(f"runs/{what}/", f"runs/{one_line(path.stem)}/")
