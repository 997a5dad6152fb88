"""Reading a study file: what is tuned, within which limits, on what, and what is believed and true of it."""

from __future__ import annotations

import reprlib
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.app.study_fields import Fields
from stretto.app.study_profile import read_latency, read_speedup, read_spread
from stretto.core.errors import InputError
from stretto.planning.profile import Profile, Scaling, Spread
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Billing, Per
from stretto.pricing.catalogue import find_instance
from stretto.pricing.instances import Instance
from stretto.pricing.price_list import make_instance, read_price_list
from stretto.search.rungs import check_rungs, make_rungs
from stretto.search.samplers import SAMPLERS
from stretto.search.space import Space, parse_space
from stretto.search.study import Direction, Study

BUILT_IN_CURVES = "builtin:resnet"

SECTIONS = ("study", "halving", "space", "limits", "cluster", "profile", "world")
STUDY_KEYS = ("name", "metric", "direction", "trials", "sampler")
HALVING_KEYS = ("rungs", "min_epochs", "eta", "max_epochs")
LIMITS_KEYS = ("deadline", "budget_usd", "q")
RENT_KEYS = ("instances", "instance", "prices", "max_nodes", "nodes", "queue_s", "init_s")
BILLING_KEYS = ("billing", "minimum_s", "granularity_s", "usd_per_gb", "dataset_gb")
SPEED_KEYS = ("epoch_s", "speedup", "spanning", "start_s")
WORLD_KEYS = ("curves", *SPEED_KEYS, "queue_s", "init_s")

MOST_TRIALS = 10**6
MOST_EPOCHS = 10**6
MOST_NODES = 10**4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """What is really so, for simulations: where learning curves come from, and the true speeds."""

    curves: str
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFile:
    """Everything a study file says."""

    tuning: Tuning
    space: Space
    sampler: str
    fixed_nodes: int
    """Nodes of the first instance type, for the policies that do not rent."""
    world: WorldSpec
    path: Path


def read_study(path: Path | str) -> StudyFile:
    """The study of a TOML file; InputError with place, value, rule and remedy for anything wrong in it."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text.", where=str(path), remedy="Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot be read ({reason}).", where=str(path), remedy="`stretto init study` writes an example."
        ) from error
    return parse_study(text, path)


def parse_study(text: str, path: Path) -> StudyFile:
    """The study of a TOML text; `path` says where it is from, and price lists lie beside it."""
    try:
        tables = tomllib.loads(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"is not TOML: {error}.", where=str(path), remedy="`stretto init study` writes an example."
        ) from error
    return study_of(tables, path)


def study_of(tables: dict[str, Any], path: Path) -> StudyFile:
    """The study of the tables of a file."""
    file = str(path)
    _check_whole_numbers(tables, file)
    sections = Fields(tables, SECTIONS, file=file, name="")
    study_fields = sections.table("study", STUDY_KEYS)
    cluster = sections.table("cluster", (*RENT_KEYS, *BILLING_KEYS))
    study = _study(study_fields, sections.table("halving", HALVING_KEYS))
    max_nodes = cluster.whole("max_nodes", at_most=MOST_NODES)
    profile = _profile(sections.table("profile", SPEED_KEYS), cluster)
    world = _world(sections.table("world", WORLD_KEYS, {}), profile)
    return StudyFile(
        tuning=Tuning(
            study=study,
            profile=profile,
            instances=_instances(cluster, path),
            max_nodes=max_nodes,
            billing=_billing(cluster),
            limits=_limits(sections.table("limits", LIMITS_KEYS, {})),
        ),
        space=_space(sections, world, file),
        sampler=study_fields.choice("sampler", SAMPLERS, "random"),
        fixed_nodes=cluster.whole("nodes", max_nodes, at_most=max_nodes),
        world=world,
        path=path,
    )


def _check_whole_numbers(tables: dict[str, Any], file: str) -> None:
    """TOML's whole numbers have 64 bits, though Python reads longer ones."""
    to_see: list[Any] = [tables]
    while to_see:
        value = to_see.pop()
        if isinstance(value, dict | list):
            to_see.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and value.bit_length() > 63:
            raise InputError(
                f"a whole number has {value.bit_length()} bits.", where=file, remedy="TOML's have 64 at most."
            )


def _study(fields: Fields, halving: Fields) -> Study:
    max_epochs = halving.whole("max_epochs", at_most=MOST_EPOCHS)
    eta = halving.whole("eta", at_least=2, at_most=MOST_TRIALS)
    return Study(
        name=fields.text("name"),
        metric=fields.text("metric"),
        direction=Direction(fields.choice("direction", tuple(Direction))),
        trials=fields.whole("trials", at_most=MOST_TRIALS),
        rungs=_rungs(halving, eta, max_epochs),
        eta=eta,
        max_epochs=max_epochs,
    )


def _rungs(halving: Fields, eta: int, max_epochs: int) -> tuple[int, ...]:
    written = halving.raw("rungs", rule='"additive", "geometric" or a list of epochs')
    if isinstance(written, list):
        rungs = halving.list("rungs", of=int, rule='"additive", "geometric" or a list of whole numbers')
        if "min_epochs" in halving:
            raise InputError(
                "min_epochs says nothing where rungs are written out.",
                where=halving.where("min_epochs"),
                remedy="Leave it out.",
            )
        return check_rungs(rungs, max_epochs, where=halving.where("rungs"))
    spacing = halving.choice("rungs", ("additive", "geometric"))
    min_epochs = halving.whole("min_epochs", at_most=MOST_EPOCHS)
    if min_epochs >= max_epochs:
        raise halving.wrong(
            "min_epochs", f"below max_epochs {max_epochs}", "Lower it, or write rungs = [] to compare never."
        )
    return make_rungs(
        "additive" if spacing == "additive" else "geometric",
        min_epochs=min_epochs,
        eta=eta,
        max_epochs=max_epochs,
    )


def _limits(fields: Fields) -> Limits:
    return Limits(
        deadline_s=fields.duration_s("deadline") if "deadline" in fields else None,
        budget_usd=fields.number("budget_usd", above=0.0) if "budget_usd" in fields else None,
        q=fields.number("q", 0.9, above=0.0, below=1.0),
    )


def _instances(cluster: Fields, path: Path) -> tuple[Instance, ...]:
    """Types of one's own, and those picked by name: from these, the price list, or else the catalogue."""
    listed = read_price_list(path.parent / cluster.text("prices")) if "prices" in cluster else ()
    names = cluster.list("instances", [], of=str, rule='a list of names, such as ["p3.8xlarge"]')
    written = cluster.list("instance", [], of=dict, rule="written as [[cluster.instance]]")
    own = [make_instance(one, where=f"{cluster.where('instance')}[{i}]") for i, one in enumerate(written)]
    where = cluster.where("instances")
    found = [find_instance(name, own=(*listed, *own), where=where) for name in names]
    found += listed if "instances" not in cluster else ()
    found += [instance for instance in own if instance.name not in names]
    if not found:
        raise InputError(
            "there is nothing to train on.",
            where=cluster.where("instances"),
            remedy='Give instances = ["p3.8xlarge"], a price list, or [[cluster.instance]] of your own.',
        )
    for position, instance in enumerate(found):
        if instance.name in {other.name for other in found[:position]}:
            raise InputError(
                f"{instance.name!r} is there twice.", where=cluster.where("instances"), remedy="Keep one."
            )
    return tuple(found)


def _billing(cluster: Fields) -> Billing:
    usual = Billing()
    return Billing(
        per=Per(cluster.choice("billing", tuple(Per), usual.per)),
        granularity_s=cluster.number("granularity_s", usual.granularity_s, above=0.0),
        minimum_s=cluster.number("minimum_s", usual.minimum_s),
        usd_per_gb=cluster.number("usd_per_gb", usual.usd_per_gb),
        dataset_gb=cluster.number("dataset_gb", usual.dataset_gb),
    )


def _profile(fields: Fields, cluster: Fields) -> Profile:
    return Profile(
        latency=read_latency(fields),
        scaling=Scaling(read_speedup(fields), fields.number("spanning", 0.0, below=1.0)),
        start_s=fields.number("start_s", 0.0),
        queue_s=read_spread(cluster, "queue_s", Spread(0.0)),
        init_s=read_spread(cluster, "init_s", Spread(0.0)),
    )


def _world(fields: Fields, believed: Profile) -> WorldSpec:
    """The truth: as believed, but for what the section says."""
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


def _space(sections: Fields, world: WorldSpec, file: str) -> Space:
    """The space; a table of curves brings its configurations along, so that it may be left out."""
    tables = sections.raw("space", {})
    needed = world.curves.startswith("builtin:")
    if not isinstance(tables, dict) or (needed and not tables):
        raise InputError(
            f"{reprlib.repr(tables)} names no hyperparameters.",
            where=f"{file}: space",
            remedy="Add a section [space] with a line such as lr = { log = [1e-4, 1.0] }.",
        )
    return parse_space(tables, where=file)


EXAMPLE_STUDY = """\
# A study: many trials of one training script, of which the best model is wanted.
# Look at what it will take:     stretto plan study.toml
# Try policies on it, simulated: stretto simulate --study study.toml --policy hypersched,asha,rubberband

[study]
name = "resnet-cifar"        # what runs of it are called
metric = "accuracy"          # what a trial reports after every epoch
direction = "max"            # "max" or "min": which way the metric is better
trials = 64                  # at most so many are drawn
sampler = "random"           # or tpe, qmc, cmaes, gp: these need pip install 'stretto[search]'

[halving]                    # at some epochs, the rungs, trials are compared; the best go on
rungs = "additive"           # each stage eta times as long as the last: epochs 1-4, 5-12, 13-28, ..
                             # "geometric": 4, 8, 16, ..; or a list, without min_epochs: [4, 12, 28]
min_epochs = 4               # the first rung
eta = 2                      # one in so many goes on past a rung
max_epochs = 508             # a trial is fully trained after this many

[space]                      # a line for each hyperparameter: { float = [low, high] }, { int = [low, high] },
lr = { log = [1e-4, 1.0] }   # { log = [low, high] } on a logarithmic scale, { choice = [..] }
momentum = { choice = [0.9, 0.95, 0.99] }   # all as likely

[limits]                     # flags override them; leave both out to see what is possible
deadline = "2h"              # seconds, or 90s, 20m, 1h30m
budget_usd = 120             # what all of it may cost
q = 0.9                      # the probability with which a plan must keep the limits

[cluster]
instances = ["p3.8xlarge"]   # names of the catalogue, here 4 V100 for 12.24 USD an hour (2024)
# prices = "prices.csv"      # a price list of your own: instance,gpus,usd_per_hour
max_nodes = 16               # nodes held at any one time
nodes = 4                    # the cluster of policies that do not rent; max_nodes if left out
billing = "instance"         # every second a node is held; "function": only the GPU time of trials
minimum_s = 60               # the least time that is charged for a node
granularity_s = 1            # time is charged in steps of this
dataset_gb = 0               # data that every new node must be given,
usd_per_gb = 0               # and what moving it costs
queue_s = { mean = 40, sd = 10 }   # how long a request for nodes waits
init_s = { mean = 30, sd = 8 }     # how long a new node then takes to be of use

# [[cluster.instance]]       # a type of your own
# name = "our-box"
# gpus = 8
# usd_per_hour = 4.0
# speed = 1.5                # of one of its GPUs, relative to those of [profile]

[profile]                    # what you believe of the speed of a trial
epoch_s = { mean = 35, sd = 3 }    # seconds of an epoch on one GPU; or { mean, trial_sd, node_sd, epoch_sd }:
                             # how much it varies between trials, between nodes, from epoch to epoch
speedup = { "1" = 1.0, "2" = 1.87, "4" = 3.42, "8" = 5.6 }   # by GPUs, on as few nodes as hold them
spanning = 0                 # share of its speed a trial loses on more nodes than it needs
start_s = 60                 # every start and resize of a trial takes this long

[world]                      # what is really so; simulations alone read it
curves = "builtin:resnet"    # where learning curves come from
# epoch_s = { mean = 40, sd = 6 }  # also speedup, spanning, start_s, queue_s, init_s: as believed if left out
"""
