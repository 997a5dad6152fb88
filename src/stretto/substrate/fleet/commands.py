"""The user's commands that launch and release nodes, checked before anything is run."""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stretto.core.errors import InputError

_LAUNCH = ("address", "instance", "name", "number", "slots")
_RELEASE = (*_LAUNCH, "ray_id")
_SAMPLE = {"address": "a:1", "instance": "i", "name": "i-1", "number": 1, "slots": 1, "ray_id": "0"}
"""Sample values for the fields."""

START_S = 600.0
"""A node that has not come this long after its request counts as refused."""

Resource = Literal["GPU", "CPU"]
"""What counts as a slot of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The commands that launch and release nodes. Run without a shell; quote as for one.

    Fields: {address} of the cluster; {name}, {instance} (its type) and {slots} of the node; {number}, the
    lowest that no other node has; in `release` also {ray_id}. A launch command may end once the node is up,
    or run as long as the node does.
    """

    launch: str
    release: str = ""
    """Empty if the node ends with the process of the launch command."""

    def __post_init__(self) -> None:
        check_launch(self.launch, where="launch command")
        check_release(self.release, where="release command")


def check_launch(template: str, *, where: str) -> None:
    """InputError if a launch command cannot be filled in."""
    _check(template, _LAUNCH, where)
    if not template.strip():
        raise InputError("it is empty.", where=where, remedy="Write the command that starts a node.")


def check_labels(template: str, *, where: str) -> None:
    """InputError if the node would not carry the labels that identify it."""
    missing = [name for name in ("name", "instance") if f"{{{name}}}" not in template]
    if missing:
        raise InputError(
            f"{template!r} has no {{{missing[0]}}}, so the node could not be recognised.",
            where=where,
            remedy="Start Ray there with --labels=stretto-node={name},stretto-instance={instance}.",
        )


def check_program(template: str, *, where: str) -> None:
    """InputError if this machine does not have the program of a command."""
    program = shlex.split(template)[0]
    if "{" not in program and shutil.which(program) is None:
        raise InputError(
            f"{program!r} is not a program that can be run.",
            where=where,
            remedy="Name a program of this machine, with its path if necessary.",
        )


def check_release(template: str, *, where: str) -> None:
    """InputError if a release command cannot be filled in."""
    _check(template, _RELEASE, where)


def _check(template: str, known: Iterable[str], where: str) -> None:
    names = ", ".join(f"{{{name}}}" for name in known)
    try:
        parts = shlex.split(template)
        fields = [name for part in parts for _, name, _, _ in string.Formatter().parse(part)]
    except ValueError as error:
        raise InputError(
            f"{template!r} cannot be read: {error}.",
            where=where,
            remedy="Close every quote, and write {{ and }} for braces.",
        ) from error
    strange = [name for name in fields if name is not None and name not in known]
    if strange:
        raise InputError(
            f"{template!r} has the unknown field {{{strange[0]}}}.", where=where, remedy=f"Fields: {names}."
        )
    try:
        for part in parts:
            part.format_map(_SAMPLE)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(
            f"{template!r} cannot be filled in: {error}.",
            where=where,
            remedy="{number} and {slots} are whole numbers, the others text; write {name} without a format.",
        ) from error
