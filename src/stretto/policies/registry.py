"""Finds policies by name or file, and reads their options as users write them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import typing
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.core.errors import InputError, did_you_mean
from stretto.core.events import Event
from stretto.planning.tuning import Tuning
from stretto.policies.base import Oracle, Policy

GROUP = "stretto.policies"
"""Entry points of this group add policies: each is a dataclass whose fields are its options."""

BUILT_IN = {
    "pollux": "stretto.policies.pollux:Pollux",
    "optimus": "stretto.policies.optimus.policy:Optimus",
    "optimus-oracle": "stretto.policies.optimus.oracle:OptimusOracle",
    "tiresias": "stretto.policies.tiresias:Tiresias",
    "drf": "stretto.policies.drf:Drf",
    "tetris": "stretto.policies.tetris:Tetris",
    "srtf": "stretto.policies.srtf:Srtf",
    "fifo": "stretto.policies.fifo:Fifo",
    "random": "stretto.policies.random_search:RandomSearch",
    "sha": "stretto.policies.sha:Sha",
    "asha": "stretto.policies.asha:Asha",
    "hyperband": "stretto.policies.hyperband:Hyperband",
    "hypersched": "stretto.policies.hypersched.policy:HyperSched",
    "rubberband": "stretto.policies.rubberband.policy:RubberBand",
}

Options = Mapping[str, Mapping[str, str]]
"""Option texts by policy and option name."""

_EVENT_KINDS = [event.kind for event in typing.get_args(Event)]
_NOT_OPTIONS = {"oracle", "tuning", "interval_s"}


def policy_names() -> list[str]:
    """All policies, built in or installed."""
    return [*BUILT_IN, *sorted(point.name for point in entry_points(group=GROUP))]


def parse_options(texts: Iterable[str]) -> Options:
    """Reads options such as `pollux.p=-1`."""
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        policy, dot, option = target.rpartition(".")
        if not (equals and dot and policy and option):
            raise InputError(
                f"--set {text!r} is not an option.", remedy="Write POLICY.OPTION=VALUE, such as pollux.p=-1."
            )
        options.setdefault(policy, {})[option] = value
    return options


def make_policy(
    name: str,
    *,
    interval_s: float | None = None,
    options: Mapping[str, str] | None = None,
    oracle: Oracle | None = None,
    tuning: Tuning | None = None,
) -> Policy:
    """The policy of this name with these options.

    `oracle` is passed to policies that know the truth, `tuning` to policies that tune a study.
    """
    kind = _load(name)
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    allowed = {
        field.name: hints[field.name] for field in fields if field.compare and field.name not in _NOT_OPTIONS
    }
    values: dict[str, Any] = {
        option: _value(name, option, text, allowed) for option, text in (options or {}).items()
    }
    if "oracle" in hints:
        if "oracle" not in name:
            raise InputError(
                f"policy {name} wants an oracle.",
                remedy="Only policies with `oracle` in their name may see the truth.",
            )
        if oracle is None:
            raise InputError(
                f"policy {name} needs the truth about jobs, which only a simulation knows.",
                remedy="Simulate a workload with it, or take another policy.",
            )
        values["oracle"] = oracle
    if "tuning" in hints:
        if tuning is None:
            raise InputError(
                f"policy {name} tunes a study, and there is none.",
                remedy=f"For jobs there are {', '.join(_for_jobs())}; for studies, "
                "`stretto tune STUDY.toml` and `stretto simulate --study STUDY.toml`.",
            )
        values["tuning"] = tuning
    if interval_s is not None and any(field.name == "interval_s" for field in fields):
        values["interval_s"] = interval_s
    try:
        policy = kind(**values)
    except TypeError as error:
        raise InputError(f"it cannot be made: {error}.", where=name, remedy=_remedy(kind)) from error
    except ValueError as error:
        if name in BUILT_IN:
            raise
        raise InputError(f"making it raised ValueError: {error}.", where=name) from error
    return checked_policy(policy, where=name)


def _remedy(kind: Any) -> str:
    """What to change in a class that cannot be made."""
    if inspect.isabstract(kind):
        methods = ", ".join(sorted(kind.__abstractmethods__))
        return f"Define {methods} in the class."
    maker = next(one for one in kind.__mro__ if "__init__" in vars(one))
    if "__dataclass_fields__" not in vars(maker):
        return (
            f"Delete __init__ of {maker.__name__}: options are fields with defaults of a class with "
            "@dataclass(frozen=True, kw_only=True)."
        )
    return "Give every option, a field of a dataclass, a default."


def with_tuning(policy: Policy, tuning: Tuning) -> Policy:
    """The same policy for a study under other conditions, such as speeds that were measured."""
    if not hasattr(policy, "tuning"):
        return policy
    if dataclasses.is_dataclass(policy):
        return typing.cast("Policy", dataclasses.replace(policy, tuning=tuning))
    other: Any = copy.copy(policy)
    other.tuning = tuning
    return typing.cast("Policy", other)


def checked_policy(policy: object, *, where: str) -> Policy:
    """Returns the object if it is a policy; otherwise raises an error that names what is missing."""
    needed = ("name", "interval_s", "wakes_on", "decide")
    missing = [name for name in needed if not hasattr(policy, name)]
    if missing or isinstance(policy, type):
        lacks = f"lacks {', '.join(missing)}" if missing else "is a class"
        raise InputError(
            f"{type(policy).__name__ if missing else repr(policy)} {lacks}.",
            where=where,
            remedy="Give an object of a subclass of stretto.policies.ordered.OrderedPolicy, or one with "
            f"{', '.join(needed)} as in stretto.policies.base.Policy.",
        )
    _check_schedule(policy, where)
    return typing.cast("Policy", policy)


def _check_schedule(policy: Any, where: str) -> None:
    """Refuse a policy that does not say when it decides."""
    if not isinstance(policy.interval_s, int | float) or not policy.interval_s > 0:
        raise InputError(
            f"interval_s is {policy.interval_s!r}.", where=where, remedy="Give a number of seconds above 0."
        )
    wakes_on = policy.wakes_on
    if not isinstance(wakes_on, set | frozenset | tuple | list):
        raise InputError(
            f"wakes_on is {wakes_on!r}.", where=where, remedy='Give a set such as {"job-submitted"}.'
        )
    for kind in wakes_on:
        if kind not in _EVENT_KINDS:
            raise InputError(
                f"wakes_on has {kind!r}, which is no kind of event.",
                where=where,
                remedy=f"{did_you_mean(str(kind), _EVENT_KINDS)}There are {', '.join(_EVENT_KINDS)}.",
            )


def check_policies(text: str) -> list[str]:
    """The policies of a comma-separated list; each must exist and appear once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--policy names no policy.", remedy=f"Policies: {', '.join(policy_names())}.")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"policy {name} is named twice.", remedy="Name every policy once.")
        _load(name)
    return names


def rents_nodes(policy: Policy) -> bool:
    """Whether a policy requests the nodes it needs; such a policy has a class attribute `rents`."""
    return bool(getattr(policy, "rents", False))


def check_targets(options: Options, policies: Iterable[str]) -> None:
    """Refuse options of policies that do not run."""
    running = list(policies)
    for policy in options:
        if policy not in running:
            raise InputError(
                f"--set {policy}.{next(iter(options[policy]))} is for a policy that is not run.",
                remedy=f"{did_you_mean(policy, running)}Policies of this run: {', '.join(running)}.",
            )


def unknown_policy(name: str) -> InputError:
    """The error for a name that no policy has."""
    names = policy_names()
    return InputError(
        f"there is no policy {name!r}.",
        remedy=f"{did_you_mean(name, names)}There are {', '.join(names)}; for one of your own give "
        "FILE.py:CLASS.",
    )


def _load(name: str) -> Any:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point.load()
    file, colon, class_name = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _class_in(Path(file), class_name)
    raise unknown_policy(name)


def _class_in(file: Path, class_name: str) -> Any:
    """The class of `FILE.py:CLASS`."""
    module = _import_file(file.absolute())
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    there = [name for name, value in vars(module).items() if isinstance(value, type)]
    there = [name for name in there if getattr(module, name).__module__ == module.__name__]
    raise InputError(
        f"{file} has no class {class_name!r}.",
        remedy=f"{did_you_mean(class_name, there)}Its classes: {', '.join(there) or 'none'}.",
    )


@functools.cache
def _import_file(file: Path) -> ModuleType:
    """Imports a file once, with its folder on the path as `python FILE` does."""
    if not file.is_file():
        raise InputError(f"{file} is not a file.", remedy="Give FILE.py:CLASS, such as mine.py:LargestFirst.")
    name = f"stretto_policy_{file.stem}"  # the file itself may have a name such as `random`
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(
            f"importing it raised {type(error).__name__}: {error}.",
            where=str(file),
            remedy=f"`python {file.name}` shows where.",
        ) from error
    return module


def _for_jobs() -> list[str]:
    """Built-in policies that schedule plain jobs."""
    needs = {"oracle", "tuning"}
    return [name for name in BUILT_IN if needs.isdisjoint(typing.get_type_hints(_load(name)))]


def _value(policy: str, option: str, text: str, allowed: Mapping[str, Any]) -> Any:
    if option not in allowed:
        there = f"{did_you_mean(option, allowed)}Its options: {', '.join(allowed) or 'none'}."
        if not allowed and ".py:" in policy:
            there += " Options are fields of a class with @dataclass(frozen=True, kw_only=True)."
        raise InputError(f"policy {policy} has no option {option!r}.", remedy=there)
    kind = allowed[option]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        if text not in choices:
            raise _wrong(policy, option, text, f"one of {', '.join(map(str, choices))}")
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise _wrong(policy, option, text, "true or false")
        return text.lower() == "true"
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if isinstance(number, float) and math.isnan(number):
        raise _wrong(policy, option, text, "a whole number" if kind is int else "a number")
    return number


def _wrong(policy: str, option: str, text: str, rule: str) -> InputError:
    return InputError(f"{policy}.{option}={text} is not valid.", remedy=f"It takes {rule}.")
