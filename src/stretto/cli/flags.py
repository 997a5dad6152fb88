"""Flags that several commands have, with one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Seed = Annotated[int, typer.Option(help="Root of all random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReportFile = Annotated[Path | None, typer.Option(help="Write an HTML report here.", show_default=False)]
