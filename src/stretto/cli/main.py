"""The `stretto` command and the table of its subcommands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stretto import __version__
from stretto.core.errors import InputError, StrettoError

COMMANDS = {
    "simulate": "simulate",
    "decide": "decide",
    "plan": "plan",
    "profile": "profile",
    "tune": "tune",
    "run": "run",
    "runs": "runs",
    "stop": "runs",
    "logs": "runs",
    "explain": "explain",
    "report": "report",
    "rm": "runs",
    "init": "init",
    "check-policy": "check_policy",
}
"""The module of each command. It is imported when the command is used, or when all of them are listed."""


def import_command(arguments: Iterable[str]) -> None:
    """Import the module of the command that these arguments begin with."""
    if (module := COMMANDS.get(next(iter(arguments), ""))) is not None:
        import_module(f"stretto.cli.{module}")


class LazyCommands(TyperGroup):
    """Makes each command when it is looked up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        function = getattr(import_module(f"stretto.cli.{COMMANDS[cmd_name]}"), cmd_name.replace("-", "_"))
        one = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        one.command(cmd_name, help=_flowing(function.__doc__ or ""))(function)
        return typer.main.get_command(one)


app = typer.Typer(
    name="stretto",
    cls=LazyCommands,
    help="Decides how many GPUs each training run gets, minute by minute.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _flowing(docstring: str) -> str:
    """Help text that wraps at the width of the terminal; an example stays on its line."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(one if one.startswith("Example") else one.replace("\n", " ") for one in paragraphs)


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
    """Run the command line. A user's mistake gives one sentence and exit code 2, never a traceback."""
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
