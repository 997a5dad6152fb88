"""Checks of the arguments of the Python functions."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import SupportsIndex, TypeVar

from stretto.core.errors import InputError
from stretto.core.units import parse_duration_s

T = TypeVar("T")


def given(value: T, kind: type[T], where: str, remedy: str) -> T:
    """The value, if it is of this kind."""
    if isinstance(value, kind):
        return value
    raise InputError(f"{_shown(value)} is no {kind.__name__}.", where=where, remedy=remedy)


def given_path(value: object, where: str, such_as: str) -> Path:
    """A path, given as a text or a path."""
    if isinstance(value, str | Path):
        return Path(value)
    raise InputError(f"{_shown(value)} is no path.", where=where, remedy=f"Give one such as {such_as!r}.")


def given_text(value: object, where: str, such_as: str) -> str:
    """A text, which may be empty."""
    if isinstance(value, str):
        return value
    raise InputError(f"{_shown(value)} is no text.", where=where, remedy=f"Give one such as {such_as!r}.")


def given_choice(value: T, choices: Collection[T], where: str) -> T:
    """The value, if it is one of the choices."""
    if value in choices:
        return value
    raise InputError(
        f"there is no {where} {_shown(value)}.", remedy=f"There are {', '.join(map(str, choices))}."
    )


def given_whole(value: object, where: str) -> int:
    """A whole number; numpy's are accepted, too."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    raise InputError(f"{_shown(value)} is no whole number.", where=where, remedy="Give one such as 2.")


def given_flag(value: object, where: str) -> bool:
    """True or False; 1 and 0 are refused."""
    if isinstance(value, bool):
        return value
    raise InputError(f"{_shown(value)} is neither True nor False.", where=where, remedy="Give one of them.")


def given_interval_s(value: object) -> float:
    """A number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise InputError(
        f"{_shown(value)} is no number.", where="interval_s", remedy="Give seconds: 60 is a minute."
    )


def given_options(value: object) -> dict[str, str]:
    """Options of a policy, as texts like those of the command line."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(
            f"{_shown(value)} does not name options.",
            where="options",
            remedy='Give a dict such as {"p": "-1"}.',
        )
    return {given_text(name, "options", "p"): _option(name, one) for name, one in value.items()}


def given_progress(value: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """A function that prints progress, or None."""
    if value is None or callable(value):
        return value
    raise InputError(f"{_shown(value)} cannot be called.", where="progress", remedy="Give print, or None.")


def given_work(value: object) -> str | tuple[str, ...] | None:
    """`train.py:train`, the words of a command, or None: as the study file says."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return tuple(given_text(word, "work", "python") for word in value)
    raise InputError(
        f"{_shown(value)} is neither the name of a training function nor a command.",
        where="work",
        remedy=_named(value) if callable(value) else 'Give "train.py:train" or ["python", "train.py"].',
    )


def _option(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InputError(
        f"{_shown(value)} is no value.", where=f"options: {name}", remedy="Give a text or a number."
    )


def _named(function: object) -> str:
    """The remedy for a function object: the name by which other processes can import it."""
    why = "other processes import it by that name"
    name, file = getattr(function, "__qualname__", ""), None
    if inspect.isfunction(function) and name.isidentifier():
        file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():
        return f'Write it at the top level of a file and give "train.py:train": {why}.'
    return f'Give "{file}:{name}": {why}.'


def _shown(value: object) -> str:
    """The value as text if it is short, else its type."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


_DEADLINE = "Give seconds, or a text such as 90s, 20m or 1h30m; math.inf for none."
_BUDGET = "Give US dollars; math.inf for none."


def given_deadline_s(deadline: float | str | None) -> float | None:
    """A deadline in seconds, from a number or a text; None: the deadline of the file."""
    try:
        given_s = parse_duration_s(deadline) if isinstance(deadline, str) else deadline
    except InputError as error:
        raise InputError(error.problem, where="deadline", remedy=_DEADLINE) from error
    return _above_0(given_s, "deadline", _DEADLINE)


def deadline_words(deadline: float | str | None) -> str | None:
    """A deadline as text, for the command that resumes the run; None stays None."""
    if deadline is None or isinstance(deadline, str):
        return deadline
    return "none" if deadline == math.inf else f"{deadline:.6f}".rstrip("0").rstrip(".")


def given_budget_usd(budget_usd: float | None) -> float | None:
    """A budget in US dollars; None: the budget of the file."""
    return _above_0(budget_usd, "budget_usd", _BUDGET)


def _above_0(value: object, where: str, remedy: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{value!r} is not a number above 0.", where=where, remedy=remedy)
    return float(value)
