"""Commands that bring up nodes and let go of them, as people write them: checked before anything is run."""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Iterable
from dataclasses import dataclass

from stretto.core.errors import InputError

_LAUNCH = ("address", "instance", "name", "number", "slots")
_RELEASE = (*_LAUNCH, "ray_id")
_SAMPLE = {"address": "a:1", "instance": "i", "name": "i-1", "number": 1, "slots": 1, "ray_id": "0"}
"""Values as those that commands are filled in with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """How nodes are brought up and let go of. Run without a shell; quote as for one.

    In both, {address} is the cluster's, {name} the node's, {instance} its type, {slots} how many of them it
    has, {number} the lowest that no other node has; `release` also knows {ray_id}. A launch command may end
    once the node is up, or go on as long as the node does.
    """

    launch: str
    release: str = ""
    """None is needed where ending the process of the launch command ends the node."""

    def __post_init__(self) -> None:
        check_launch(self.launch, where="launch command")
        check_release(self.release, where="release command")


def check_launch(template: str, *, where: str) -> None:
    """InputError if nodes cannot be launched with this."""
    _check(template, _LAUNCH, where)
    if not template.strip():
        raise InputError("it is empty.", where=where, remedy="Write how a node is started.")


def check_labels(template: str, *, where: str) -> None:
    """InputError if a node could not be told that it is the one that was asked for."""
    missing = [name for name in ("name", "instance") if f"{{{name}}}" not in template]
    if missing:
        raise InputError(
            f"{template!r} has no {{{missing[0]}}}, so that the node would be taken for somebody else's.",
            where=where,
            remedy="Start Ray there with --labels=stretto-node={name},stretto-instance={instance}.",
        )


def check_program(template: str, *, where: str) -> None:
    """InputError if the program of a command is not on this machine."""
    program = shlex.split(template)[0]
    if "{" not in program and shutil.which(program) is None:
        raise InputError(
            f"{program!r} is not a program that can be run.",
            where=where,
            remedy="Write one that is on this machine, with its path if need be.",
        )


def check_release(template: str, *, where: str) -> None:
    """InputError if nodes cannot be let go of with this."""
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
        raise InputError(f"{template!r} has {{{strange[0]}}}.", where=where, remedy=f"It may have {names}.")
    try:
        for part in parts:
            part.format_map(_SAMPLE)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(
            f"{template!r} cannot be filled in: {error}.",
            where=where,
            remedy="{number} and {slots} are whole numbers, the others words; write {name} plainly.",
        ) from error
