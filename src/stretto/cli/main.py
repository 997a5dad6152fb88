"""The `stretto` command."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated

import typer

from stretto import __version__
from stretto.cli.check_policy import check_policy
from stretto.cli.decide import decide
from stretto.cli.explain import explain
from stretto.cli.init import init
from stretto.cli.plan import plan
from stretto.cli.profile import profile
from stretto.cli.report import report
from stretto.cli.run import run
from stretto.cli.runs import logs, rm, runs, stop
from stretto.cli.simulate import simulate
from stretto.cli.tune import tune
from stretto.core.errors import InputError, StrettoError

app = typer.Typer(
    name="stretto",
    help="Decides how many GPUs each training run gets, minute by minute.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _flowing(docstring: str) -> str:
    """Help whose sentences are broken where the terminal ends; a line with an example stays one."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(one if one.startswith("Example") else one.replace("\n", " ") for one in paragraphs)


for _command in (
    simulate,
    decide,
    plan,
    profile,
    tune,
    run,
    runs,
    stop,
    logs,
    explain,
    report,
    rm,
    init,
    check_policy,
):
    app.command(help=_flowing(_command.__doc__ or ""))(_command)


def _version(asked: bool) -> None:
    if asked:
        print(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def _stretto(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line; what a user did wrong is a sentence and exit code 2, never a traceback."""
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {place}{error.strerror or error}.", file=sys.stderr)
        sys.exit(1)
