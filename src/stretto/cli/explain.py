"""`stretto explain`: why a run did what it did."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stretto.app.explain import explain as explain_run
from stretto.app.run_folder import find_run
from stretto.cli.flags import AsJson
from stretto.report.run_jobs_text import story_text


def explain(
    run: Annotated[str, typer.Argument(help="A run under ./runs, or its folder.")],
    job: Annotated[str | None, typer.Argument(help="A job or trial of it.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Tell the story of a run, or of one job: every decision with its reason, retries, notes, checkpoints.

    Example: [bold]stretto explain resnet-cifar trial-003[/bold]
    """
    story = explain_run(find_run(run), job)
    if as_json:
        print(json.dumps(story.as_dict(), indent=2, allow_nan=False))
    else:
        print(story_text(story), end="")
