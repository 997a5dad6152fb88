"""Reads a study file: what is tuned, the limits, the hardware, believed speeds, and the simulated truth."""

from __future__ import annotations

import math
import reprlib
import tomllib
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.inputs.arguments import given_path
from stretto.inputs.cluster import (
    CLUSTER_KEYS,
    MACHINE_KEYS,
    RAY_KEYS,
    RENT_KEYS,
    MachineSpec,
    RayNodes,
    cluster_of,
    machine_of,
    ray_of,
    slots_offer,
)
from stretto.inputs.fields import Fields
from stretto.inputs.profile import MeasuredProfile, believe, read_profile
from stretto.inputs.study_section import SECTIONS, STUDY_KEYS, study_in
from stretto.planning.profile import Latency, Profile, Scaling, Spread, SpreadBelief
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.instances import Offer
from stretto.search.samplers import SAMPLERS
from stretto.search.space import SPACE_FORMS, Space, parse_space
from stretto.search.study import Study

MOST_VARIATION = 10.0
"""A standard deviation of more than this many means is a mistake."""


def read_spread(fields: Fields, key: str, default: SpreadBelief) -> SpreadBelief:
    """A mean with a standard deviation, or a single number."""
    if not isinstance(fields.raw(key, None), dict):
        return Spread(fields.number(key)) if key in fields else default
    table = fields.table(key, ("mean", "sd"))
    mean = table.number("mean")
    return Spread(mean, _sd(table, "sd", mean))


def _sd(table: Fields, key: str, mean: float) -> float:
    value = table.number(key, 0.0)
    if value > MOST_VARIATION * mean:
        raise table.wrong(key, f"at most {MOST_VARIATION:g} times the mean {mean:g}")
    return value


def read_latency(fields: Fields) -> Latency:
    """The time of an epoch and its variation.

    The factors of trial, node and epoch multiply, so 1 + the relative variance of the whole is the product of
    1 + theirs. An sd alone is shared out equally: 1 + v = (1 + (sd / mean)^2)^(1/3) for each.
    """
    if not isinstance(fields.raw("epoch_s", rule="seconds, or { mean = 35, sd = 3 }"), dict):
        return Latency(epoch_s=fields.number("epoch_s", above=0.0))
    parts = ("trial_sd", "node_sd", "epoch_sd")
    table = fields.table("epoch_s", ("mean", "sd", *parts))
    mean_s = table.number("mean", above=0.0)
    if "sd" not in table:
        trial_sd, node_sd, epoch_sd = (_sd(table, part, mean_s) / mean_s for part in parts)
        return Latency(epoch_s=mean_s, trial_sd=trial_sd, node_sd=node_sd, epoch_sd=epoch_sd)
    for part in parts:
        if part in table:
            raise InputError(
                f"{part} is given beside sd, which covers it.",
                where=table.where(part),
                remedy=f"Give sd, or {', '.join(parts)}.",
            )
    relative = _sd(table, "sd", mean_s) / mean_s
    each = ((1.0 + relative * relative) ** (1.0 / 3.0) - 1.0) ** 0.5
    return Latency(epoch_s=mean_s, trial_sd=each, node_sd=each, epoch_sd=each)


def read_speedup(fields: Fields) -> tuple[tuple[int, float], ...]:
    example = 'a table such as { "1" = 1.0, "2" = 1.87 }'
    written = fields.raw("speedup", rule=example)
    if not isinstance(written, dict):
        raise fields.wrong("speedup", example)
    for gpus in written:
        if not (gpus.isascii() and gpus.isdigit() and len(gpus) < 10 and str(int(gpus)) == gpus != "0"):
            raise InputError(
                f"{reprlib.repr(gpus)} is not a number of GPUs.",
                where=fields.where("speedup"),
                remedy=f"Give {example}.",
            )
    table = fields.table("speedup", tuple(written))
    points = sorted((int(gpus), table.number(gpus, above=0.0)) for gpus in written)
    if not points or points[0] != (1, 1.0):
        raise InputError(
            f"{reprlib.repr(written)} does not start from one GPU at speed 1.",
            where=fields.where("speedup"),
            remedy='Add "1" = 1.0, and give the others relative to it.',
        )
    return tuple(points)


BUILT_IN_CURVES = "builtin:resnet"

MOST_DEPTH = 30
LONGEST_KEY = 100
"""Bytes of a name."""
ANY_NUMBER = "Give a number such as 0.1."
FLAT = f"Write it flat: lists and tables may be {MOST_DEPTH} deep."
LIMITS_KEYS = ("deadline", "budget_usd", "q")
SPEED_KEYS = ("epoch_s", "speedup", "spanning", "start_s")
PROFILE_KEYS = (*SPEED_KEYS, "file")
WORLD_KEYS = ("curves", *SPEED_KEYS, "queue_s", "init_s")

LONGEST_LINE = 20_000
"""In characters. A longer dotted key would take minutes to parse."""

UNKNOWN_PROFILE = Profile(latency=Latency(epoch_s=1.0), scaling=Scaling(((1, 1.0),)))
"""Placeholder for a profile that is not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """Nodes that are launched on request."""

    offer: Offer
    nodes: RayNodes
    queue_s: SpreadBelief
    init_s: SpreadBelief


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutline:
    """The parts of a study file that do not depend on where it runs."""

    study: Study
    space: Space
    sampler: str
    limits: Limits
    machine: MachineSpec
    entry: str | None
    """`train.py:train`, relative to the folder of the file."""
    command: tuple[str, ...]
    """Command of a trial; empty if the file has none."""
    checkpoints: bool
    """The command saves on SIGTERM and resumes when it is started again."""
    in_folder: bool
    """The command of each trial runs in a separate folder."""
    profile: Profile | None
    """None: not measured yet."""
    has_cluster: bool
    """Whether it has a section [cluster]."""
    rented: Rented | None
    """The nodes that are launched on a Ray cluster, and how; None without a section [ray]."""
    tables: dict[str, Any]
    """The file as it was written."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """The truth of simulations: the source of learning curves, and the true speeds."""

    curves: str
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFile:
    """The content of a study file."""

    tuning: Tuning
    space: Space
    sampler: str
    fixed_nodes: int
    """Nodes of the first instance type, for policies that do not rent."""
    world: WorldSpec
    path: Path


def read_study(path: Path | str) -> StudyFile:
    """Reads the study of a TOML file; an InputError names the place, value, rule and remedy."""
    path = given_path(path, "path", "study.toml")
    return parse_study(read_text(path, "study"), path)


def read_outline(path: Path | str) -> StudyOutline:
    """Reads the study of a TOML file that may lack a cluster and a profile."""
    return outline_of(parse_toml(read_text(Path(path), "study"), Path(path), "study"), Path(path))


def read_text(path: Path, what: str) -> str:
    """Reads a text file; the remedy of an error is `stretto init WHAT`, which writes an example."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text.", where=str(path), remedy="Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot be read ({reason}).", where=str(path), remedy=f"`stretto init {what}` writes an example."
        ) from error
    return text


def parse_study(text: str, path: Path) -> StudyFile:
    """Reads the study in a TOML text; `path` is for messages, and other files are relative to it."""
    return study_of(parse_toml(text, path, "study"), path)


def parse_toml(text: str, path: Path, what: str) -> dict[str, Any]:
    """Parses TOML and checks every value."""
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LONGEST_LINE:
            raise InputError(
                f"the line has {len(line)} characters.",
                where=f"{path}:{number}",
                remedy=f"A line has {LONGEST_LINE} at most; a list may continue in the next one.",
            )
    try:
        tables = tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError as error:
        raise InputError("is nested too deeply.", where=str(path), remedy=FLAT) from error
    except ValueError as error:
        raise InputError(
            f"is not TOML: {error}.", where=str(path), remedy=f"`stretto init {what}` writes an example."
        ) from error
    _check_values(tables, str(path))
    return tables


def study_of(tables: dict[str, Any], path: Path) -> StudyFile:
    """Reads all that a plan needs, hardware and speeds included, from a parsed study file."""
    outline = outline_of(tables, path)
    if outline.profile is None:
        raise InputError(
            "profile is missing.",
            where=f"{path}: profile",
            remedy=f"Give a table with {', '.join(PROFILE_KEYS)}; `stretto profile` measures one.",
        )
    sections = Fields(tables, SECTIONS, file=str(path), name="")
    rented, slots = _rented(sections), outline.machine.slots
    if rented is None and slots is None:
        raise InputError(
            "cluster is missing.",
            where=f"{path}: cluster",
            remedy=f"Give a table with {', '.join(RENT_KEYS)}; or slots in [machine], to plan for one.",
        )
    offer = slots_offer(slots or 1, outline.machine) if rented is None else cluster_of(rented, path)
    max_nodes = offer.max_nodes
    return StudyFile(
        tuning=Tuning(
            study=outline.study,
            profile=outline.profile,
            instances=offer.instances,
            max_nodes=max_nodes,
            billing=offer.billing,
            limits=outline.limits,
        ),
        space=outline.space,
        sampler=outline.sampler,
        fixed_nodes=max_nodes if rented is None else rented.whole("nodes", max_nodes, at_most=max_nodes),
        world=_world(sections.table("world", WORLD_KEYS, {}), outline.profile),
        path=path,
    )


def outline_of(tables: dict[str, Any], path: Path) -> StudyOutline:
    """Reads the outline from a parsed study file."""
    file = str(path)
    if "job" in tables and "study" not in tables:
        raise InputError(
            "is a file of jobs, not a study.", where=file, remedy=f"`stretto run {file}` runs them."
        )
    _check_values(tables, file)
    sections = Fields(tables, SECTIONS, file=file, name="")
    fields = sections.table("study", STUDY_KEYS)
    rented = _rented(sections)
    world = sections.table("world", WORLD_KEYS, {})
    if "entry" in fields and "command" in fields:
        raise InputError(
            "entry and command are both given.", where=fields.where("entry"), remedy="Keep one of them."
        )
    return StudyOutline(
        study=study_in(sections),
        space=_space(sections, world.text("curves", BUILT_IN_CURVES), file),
        sampler=fields.choice("sampler", SAMPLERS, "random"),
        limits=_limits(sections.table("limits", LIMITS_KEYS, {})),
        machine=machine_of(sections.table("machine", MACHINE_KEYS, {})),
        entry=fields.text("entry") if "entry" in fields else None,
        command=tuple(fields.list("command", [], of=str, rule='a list such as ["python", "train.py"]')),
        checkpoints=_of_command(fields, "checkpoints", "a training function always has them"),
        in_folder=_of_command(fields, "in_folder", "a training function keeps its checkpoints in one"),
        profile=_profile(sections.table("profile", PROFILE_KEYS), rented, path)
        if "profile" in sections
        else None,
        has_cluster=rented is not None,
        rented=_really_rented(sections, rented, path),
        tables=tables,
        path=path,
    )


def belief_of(measured: MeasuredProfile, outline: StudyOutline, offer: Offer) -> Profile:
    """The belief after a probe: trials run where it ran, unless nodes of [cluster] are launched for them."""
    rented = outline.rented
    if rented is None or offer != rented.offer:
        return believe(measured)
    return believe(measured, same_machine=False, queue_s=rented.queue_s, init_s=rented.init_s)


def tuning_on(
    offer: Offer, outline: StudyOutline, profile: Profile, limits: Limits, *, elastic: bool
) -> Tuning:
    """The study on the given hardware.

    Trials that are not `elastic` cannot use more slots: they would have to start over.
    """
    return Tuning(
        study=outline.study,
        profile=profile if elastic else replace(profile, scaling=UNKNOWN_PROFILE.scaling),
        instances=offer.instances,
        max_nodes=offer.max_nodes,
        billing=offer.billing,
        limits=limits,
    )


def _of_command(fields: Fields, name: str, otherwise: str) -> bool:
    if name in fields and "entry" in fields:
        raise InputError(
            f"{name} is about a command; {otherwise}.",
            where=fields.where(name),
            remedy="Leave it out.",
        )
    return fields.flag(name, default=False)


def _rented(sections: Fields) -> Fields | None:
    return sections.table("cluster", CLUSTER_KEYS) if "cluster" in sections else None


def _really_rented(sections: Fields, rented: Fields | None, path: Path) -> Rented | None:
    if "ray" not in sections:
        return None
    if rented is None:
        raise InputError(
            "there is a section [ray], but no [cluster] that says which nodes it launches.",
            where=f"{path}: ray",
            remedy=f"Give a table [cluster] with {', '.join(RENT_KEYS)}.",
        )
    queue_s, init_s = _delays(rented)
    return Rented(
        offer=cluster_of(rented, path),
        nodes=ray_of(sections.table("ray", RAY_KEYS)),
        queue_s=queue_s,
        init_s=init_s,
    )


def _delays(rented: Fields | None) -> tuple[SpreadBelief, SpreadBelief]:
    """The time a node waits in the queue, and then needs to initialise."""
    at_once = Spread(0.0)
    if rented is None:
        return at_once, at_once
    return read_spread(rented, "queue_s", at_once), read_spread(rented, "init_s", at_once)


def _check_values(tables: dict[str, Any], file: str) -> None:
    """Refuses values that do not survive being written and read again; the error names the key."""
    to_see: list[tuple[str, int, Any]] = [("", 0, tables)]
    while to_see:
        key, depth, value = to_see.pop()
        if depth > MOST_DEPTH:
            raise InputError(
                f"lists and tables are nested more than {MOST_DEPTH} deep.",
                where=f"{file}: {key[:LONGEST_KEY]}",
                remedy=FLAT,
            )
        if isinstance(value, dict):
            _check_names(value, f"{file}: {key[:LONGEST_KEY]}" if key else file)
            to_see.extend((f"{key}.{name}" if key else name, depth + 1, one) for name, one in value.items())
        elif isinstance(value, list):
            to_see.extend((f"{key}[{index}]", depth + 1, one) for index, one in enumerate(value))
        elif (wrong := _unusable(value)) is not None:
            problem, remedy = wrong
            raise InputError(
                problem,
                where=f"{file}: {key[:LONGEST_KEY]}",
                remedy=_fitting(key, remedy),
            )


def _check_names(table: dict[str, Any], where: str) -> None:
    for name in table:
        if (size := len(name.encode(errors="replace"))) > LONGEST_KEY:
            raise InputError(
                f"the name {reprlib.repr(name)} has {size} bytes.",
                where=where,
                remedy=f"Take one of {LONGEST_KEY} at most.",
            )


def _fitting(key: str, remedy: str) -> str:
    """The remedy that fits the section in which the value stands."""
    if ".config." in key or ".choice[" in key:
        return remedy
    if key.startswith("space."):
        return SPACE_FORMS
    return "Give a finite number." if remedy == ANY_NUMBER else remedy


def _unusable(value: object) -> tuple[str, str] | None:
    """The problem with a single value and the remedy; None if it is fine."""
    match value:
        case bool():
            return None
        case int() if value.bit_length() > 63:
            return f"a whole number has {value.bit_length()} bits.", "TOML's have 64 at most."
        case float() if not math.isfinite(value):
            return f"{value} is not a finite number.", ANY_NUMBER
        case str() if "\0" in value:
            return f"{reprlib.repr(value)} has a NUL character.", "Leave it out."
        case date() | time():
            return f"{value} is a date or time.", f'Write it as a text: "{value}".'
        case _:
            return None


def _limits(fields: Fields) -> Limits:
    return Limits(
        deadline_s=fields.duration_s("deadline") if "deadline" in fields else None,
        budget_usd=fields.number("budget_usd", above=0.0) if "budget_usd" in fields else None,
        q=fields.number("q", 0.9, above=0.0, below=1.0),
    )


def _profile(fields: Fields, rented: Fields | None, path: Path) -> Profile:
    queue_s, init_s = _delays(rented)
    if "file" in fields:
        for key in SPEED_KEYS:
            if key in fields:
                raise InputError(
                    f"{key} is given beside file, which has it.",
                    where=fields.where(key),
                    remedy="Keep one of them.",
                )
        measured = read_profile(path.parent / fields.text("file"))
        return believe(measured, same_machine=rented is None, queue_s=queue_s, init_s=init_s)
    return Profile(
        latency=read_latency(fields),
        scaling=Scaling(read_speedup(fields), fields.number("spanning", 0.0, below=1.0)),
        start_s=fields.number("start_s", 0.0),
        queue_s=queue_s,
        init_s=init_s,
    )


def _world(fields: Fields, believed: Profile) -> WorldSpec:
    """The truth: as believed, except for the values in the section."""
    scaling = believed.scaling
    return WorldSpec(
        curves=fields.text("curves", BUILT_IN_CURVES),
        profile=replace(
            believed,
            latency=read_latency(fields) if "epoch_s" in fields else believed.latency,
            scaling=Scaling(
                read_speedup(fields) if "speedup" in fields else scaling.points,
                fields.number("spanning", scaling.spanning, below=1.0),
            ),
            start_s=fields.number("start_s", believed.start_s),
            queue_s=read_spread(fields, "queue_s", believed.queue_s),
            init_s=read_spread(fields, "init_s", believed.init_s),
        ),
    )


def _space(sections: Fields, curves: str, file: str) -> Space:
    """The search space. It may be missing if the curves are a table, which has its own configurations."""
    tables = sections.raw("space", {})
    needed = curves.startswith("builtin:")
    if not isinstance(tables, dict) or (needed and not tables):
        raise InputError(
            f"{reprlib.repr(tables)} names no hyperparameters.",
            where=f"{file}: space",
            remedy="Add a section [space] with a line such as lr = { log = [1e-4, 1.0] }.",
        )
    return parse_space(tables, where=file)


EXAMPLE_STUDY = """\
# A study: many trials of one training script, to find the best model.
# Look at what it will take:     stretto plan study.toml
# Try policies on it, simulated: stretto simulate --study study.toml --policy hypersched,asha,rubberband
# Train it on this machine:      stretto tune study.toml train.py:train --deadline 10m
# Train it on a Ray cluster:     stretto tune study.toml train.py:train --deadline 10m --on ray

[study]
name = "resnet-cifar"        # what runs of it are called
metric = "accuracy"          # what a trial reports after every epoch
direction = "max"            # "max" or "min": which way the metric is better
trials = 64                  # the most trials that are drawn
sampler = "random"           # or tpe, qmc, cmaes, gp: these need pip install 'stretto[search]'
# entry = "train.py:train"   # what `stretto tune` trains, in this folder; or any command:
# command = ["python", "train.py", "--lr", "{lr}", "--momentum", "{momentum}"]

[halving]                    # at some epochs, the rungs, trials are compared; the best continue
rungs = "additive"           # each stage eta times as long as the last: epochs 1-4, 5-12, 13-28, ..
                             # "geometric": 4, 8, 16, ..; or a list, without min_epochs: [4, 12, 28]
min_epochs = 4               # the first rung
eta = 2                      # the best 1/eta of the trials pass a rung
max_epochs = 508             # a trial is fully trained after this many

[space]                      # a line for each hyperparameter: { float = [low, high] }, { int = [low, high] },
lr = { log = [1e-4, 1.0] }   # { log = [low, high] } on a logarithmic scale, { choice = [..] }
momentum = { choice = [0.9, 0.95, 0.99] }   # all equally likely

[limits]                     # flags override them; leave both out to see what is possible
deadline = "2h"              # seconds, or 90s, 20m, 1h30m
budget_usd = 120             # the most that all of it may cost
q = 0.9                      # the probability with which a plan must keep the limits

# [machine]                  # where `stretto tune` trains; it needs no [cluster] and no [profile]
# slots = 2                  # workers at once; left out: one for every GPU, or else for every core
# usd_per_slot_hour = 0      # what a slot costs you, also one of a cluster of your own

[cluster]                    # nodes to rent in plans and simulations; really rented only with [ray]
instances = ["p3.8xlarge"]   # names of the catalogue, here 4 V100 for 12.24 USD an hour (2024)
# prices = "prices.csv"      # a price list of your own: instance,gpus,usd_per_hour
max_nodes = 16               # nodes held at any one time
nodes = 4                    # the cluster of policies that do not rent; max_nodes if left out
billing = "instance"         # every second a node is held; "function": only the GPU time of trials
minimum_s = 60               # the minimum time charged for a node
granularity_s = 1            # time is charged in steps of this
dataset_gb = 0               # data that every new node receives,
usd_per_gb = 0               # and what moving it costs
queue_s = { mean = 40, sd = 10 }   # how long a request for nodes waits
init_s = { mean = 30, sd = 8 }     # how long a new node then takes to start up

# [[cluster.instance]]       # a type of your own
# name = "our-box"
# gpus = 8
# usd_per_hour = 4.0
# speed = 1.5                # speed of one of its GPUs, relative to those of [profile]

# [ray]                      # with --on ray and a policy that rents: how nodes of [cluster] are launched
# autoscaler = true          # by Ray's, whose node types need a label stretto-instance; or by commands:
# launch = "./up {number} {address} {slots} {name} {instance}"   # docs/cluster.md has one that uses ssh
# release = "./down {number}"
# start_timeout = "10m"      # a launch that takes longer has failed
# slot = "gpu"               # the resource that counts as a slot: "gpu" or "cpu"

[profile]                    # the believed speed of a trial
# file = "profile.json"      # measured by `stretto profile`; replaces all that follows
epoch_s = { mean = 35, sd = 3 }    # seconds of an epoch on one GPU; or { mean, trial_sd, node_sd, epoch_sd }:
                             # how much it varies between trials, between nodes, from epoch to epoch
speedup = { "1" = 1.0, "2" = 1.87, "4" = 3.42, "8" = 5.6 }   # by number of GPUs, on the fewest nodes
spanning = 0                 # share of its speed that a trial loses on more nodes than it needs
start_s = 60                 # every start and resize of a trial takes this long

[world]                      # the truth in simulations; nothing else reads it
curves = "builtin:resnet"    # where learning curves come from
# epoch_s = { mean = 40, sd = 6 }  # also speedup, spanning, start_s, queue_s, init_s: as believed if left out
"""
