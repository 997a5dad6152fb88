"""Flags that several commands have, with one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Seed = Annotated[int, typer.Option(help="Root of all random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Slots = Annotated[
    int | None, typer.Option(help="Workers at once.", show_default="one for every GPU, else for every core")
]
On = Annotated[str, typer.Option(metavar="PLACE", help="Where it trains: local, ray or ray:ADDRESS.")]
Store = Annotated[
    str, typer.Option(metavar="URL", help="Keep checkpoints there too, for every node.", show_default=False)
]
ReportFile = Annotated[Path | None, typer.Option(help="Write an HTML report here.", show_default=False)]
InFolder = Annotated[
    bool, typer.Option("--in-folder", help="Each command runs in a folder of its job's own.")
]
