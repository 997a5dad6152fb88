"""The profile of a training script: the file that measuring writes, and what it lets a planner believe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import msgspec
import numpy as np

from stretto.core.errors import InputError
from stretto.core.job import Value
from stretto.core.observations import SpeedSample
from stretto.core.seeds import child_rng
from stretto.core.units import counted
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.models.speed import AllReduceSpeed, fit_all_reduce
from stretto.planning.learning import NODE_SCALE, LatencyPosterior, Observation, learn_latency, updated_delay
from stretto.planning.profile import Profile, Scaling, Spread, SpreadBelief
from stretto.system.plain_json import UnreadableError, checksum, read_json
from stretto.system.private_files import make_private_folder, write_private

PACE_SD = 0.065
"""How much a machine's pace differs from what it was during a probe, relative to it.
`benchmarks/prediction.py --calibrate` measures it on other studies than the benchmark reports on: 0.05 at one
time, 0.08 at another, but 0.28 of a network whose epochs take milliseconds."""
CROWD_SD = 0.2
"""How much epochs beside busy neighbours differ from those of a worker that had the machine to itself, where
only these were timed, relative to them. Chosen by hand."""
LONE_CHANCE = 1.08
"""By so much some seconds of training differ from the next ones, whoever trains beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile(Profile):
    """Of trials that run where they were probed: all slots busy, and what changes when few of them are."""

    slots: int
    lone_epoch: float
    """Time of an epoch while the other slots are idle, relative to when they are busy."""
    lone_start_s: float
    gang_start_s: float
    """What a start or resize to several workers costs."""

    def epoch_factor(self, busy: int) -> float:
        """Time of an epoch while so many slots are busy, relative to all of them: linear in between."""
        return self.lone_epoch + (1.0 - self.lone_epoch) * self._crowding(busy)

    def start_s_at(self, busy: int, workers: int = 1) -> float:
        """What a start of so many workers costs while so many slots are busy."""
        if workers > 1:
            return self.gang_start_s
        return self.lone_start_s + (self.start_s - self.lone_start_s) * self._crowding(busy)

    def _crowding(self, busy: int) -> float:
        return (min(busy, self.slots) - 1) / (self.slots - 1) if self.slots > 1 else 1.0


def beyond_chance(ratio: float) -> float:
    """Of time alone to time in company, what is not chance; idle neighbours slow nobody down."""
    return min(ratio * LONE_CHANCE, 1.0)


def at_another_time(
    latency: LatencyPosterior, rng: np.random.Generator, *, crowded: bool = False
) -> LatencyPosterior:
    """The same machine later: one factor of mean 1 for all that runs on it, exp(s z - s^2 / 2).

    `crowded`: by then it is busier than it was, too.
    """
    draws, sd = latency.draws, float(np.hypot(PACE_SD, CROWD_SD)) if crowded else PACE_SD
    normal = rng.standard_normal(len(draws.epoch_s))
    later_s = draws.epoch_s * np.exp(sd * normal - sd**2 / 2.0)
    return LatencyPosterior(replace(draws, epoch_s=later_s))


FORMAT = "stretto-profile"
VERSION = 1
CHECK = "check"
"""The checksum of all else in the file, which those of 0.1 do not have."""
START_SD = 0.3
"""How much what starts cost differs from what a probe saw, relative to it; chosen like `PACE_SD`."""
LEAST_STARTS = 3
"""Of fewer it cannot be said how much they differ .."""
UNKNOWN_START_SD = 0.5
""".. and half of it is taken."""

_REMEDY = "Measure again with `stretto profile`."


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEpoch:
    """One whole epoch that ran undisturbed, while the other slots were as busy as in a study."""

    config: int
    """Which of the configurations."""
    workers: int
    epoch_s: float
    first: bool
    """The first after a start or resize, which is often slower."""
    lone: bool = False
    """The other slots were idle instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedConfig:
    """A configuration whose training failed while it was tried."""

    config: int
    """Which of the configurations."""
    error: str
    """What its traceback says in the end."""
    log: str = ""
    """Where what it printed is kept; empty: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedNode:
    """A node that was launched to measure on, and let go of afterwards."""

    instance: str
    queue_s: float
    """How long its request waited."""
    init_s: float
    """How long it then took to be of use, with the training code loaded."""
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What tells a measurement from those of other code, machines and studies."""

    code: str
    """Digest of the training code's files, as far as they are known."""
    machine: str
    """Where the command was given and, without a cluster, the devices that it used."""
    nodes: tuple[str, ...]
    """Of a cluster, if some were there to measure on."""
    study: str
    """Digest of what the study's file says, but for what has no part in its speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """What a probe saw. Times in seconds; what is empty or None was not measured."""

    what: str
    """The entry or command."""
    slots: int
    measured_s: float
    """How long the probe took."""
    configs: tuple[dict[str, Value], ...]
    epochs: tuple[TimedEpoch, ...]
    speeds: tuple[SpeedSample, ...]
    """One mean for each number of workers and batch size, all of one configuration."""
    warm_up_s: float | None
    """The very first start, which also loads the training code."""
    starts_s: tuple[float, ...]
    resizes_s: tuple[float, ...]
    examples: int | None
    """Of an epoch, as the training code says."""
    speed: AllReduceSpeed | None
    """The model of a step's time, fitted to `speeds`."""
    not_measured: tuple[str, ...]
    """What a reader might look for and will not find, in words."""
    lone_starts_s: tuple[float, ...] = ()
    """Starts while the other slots were idle."""
    gang_starts_s: tuple[float, ...] = ()
    """Starts of several workers at once; all others are of one."""
    node: ProbedNode | None = None
    """Where a node had to be launched for it."""
    origin: Origin | None = None
    """None: not written down."""
    given_s: float | None = None
    """What the probe was to take at most, once it trains; None: not written down."""
    cut_short: bool = False
    """It would have gone on, had there been more time."""
    most_workers: int | None = None
    """Of a gang, where not all slots may go to one."""
    failed: tuple[FailedConfig, ...] = ()

    @property
    def tells_epochs(self) -> bool:
        """Whether anything says how long an epoch takes."""
        return bool(self.epochs) or (self.examples is not None and self.examples_per_s(1) is not None)

    @property
    def failure(self) -> str:
        """A line on the configurations that failed; empty if none did."""
        if not self.failed:
            return ""
        first = self.failed[0]
        values = ", ".join(f"{name} = {_short(value)}" for name, value in self.configs[first.config].items())
        log = f"; log: {first.log}" if first.log else ""
        return (
            f"{len(self.failed)} of {counted(len(self.configs), 'configuration')} failed when tried, "
            f"the first with {values or 'no hyperparameters'}: {first.error}{log}"
        )

    @property
    def only_lone(self) -> bool:
        """Single workers were timed only while the other slots were idle."""
        lone = {one.lone for one in self.epochs if one.workers == 1}
        return self.slots > 1 and lone == {True}

    def epoch_times_s(self, workers: int, config: int | None = None, *, lone: bool = False) -> list[float]:
        """Steady epochs with so many workers; first ones, or lone ones, only where there are no others."""
        lone = lone or (workers == 1 and self.only_lone)
        seen = [
            one
            for one in self.epochs
            if one.workers == workers and one.lone == lone and (config is None or one.config == config)
        ]
        return [one.epoch_s for one in seen if not one.first] or [one.epoch_s for one in seen]

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """Those of which epochs or steps were timed."""
        epochs, steps = (one.workers for one in self.epochs), (one.workers for one in self.speeds)
        return tuple(sorted({*epochs, *steps}))

    def speedup(self, workers: int) -> float | None:
        """Speed relative to one worker, by epochs of the same configuration, else by steps; None: unknown."""
        if workers == 1:
            return 1.0
        ratios = [
            float(np.log(fmean(alone) / fmean(together)))
            for config in range(len(self.configs))
            if (alone := self.epoch_times_s(1, config)) and (together := self.epoch_times_s(workers, config))
        ]
        if ratios:
            return float(np.exp(fmean(ratios)))
        alone_rate, rate = self.examples_per_s(1), self.examples_per_s(workers)
        return None if alone_rate is None or rate is None else rate / alone_rate

    def examples_per_s(self, workers: int) -> float | None:
        """The best over batch sizes."""
        rates = [
            workers * one.atomic / one.step_s
            for one in self.speeds
            if one.workers == workers and one.step_s > 0
        ]
        return max(rates, default=None)

    @property
    def lone_epoch(self) -> float:
        """Time of an epoch while the other slots are idle, relative to when they are busy; 1: not known."""
        ratios = [
            median(lone) / median(busy)
            for config in range(len(self.configs))
            if (lone := self.epoch_times_s(1, config, lone=True)) and (busy := self.epoch_times_s(1, config))
        ]
        return fmean(ratios) if ratios else 1.0

    @property
    def lone_start_s(self) -> float:
        """What a start costs while the other slots are idle; as ever where that was not measured."""
        if not self.lone_starts_s:
            return self.start_s
        return median(self.lone_starts_s) + self.first_epoch_extra_s

    @property
    def first_epoch_extra_s(self) -> float:
        """How much longer than the others the first epoch after a start takes, where both were seen."""
        extra = [
            one.epoch_s - fmean(steady)
            for one in self.epochs
            if one.first
            and (
                steady := [
                    other.epoch_s
                    for other in self.epochs
                    if not other.first
                    and (other.config, other.workers, other.lone) == (one.config, one.workers, one.lone)
                ]
            )
        ]
        return max(fmean(extra), 0.0) if extra else 0.0

    @property
    def start_s(self) -> float:
        """What a start of a warm trial costs: until it trains, and what its first epoch takes longer.

        By the median, as the first checkpoint of a process takes several times as long as those after it.
        Not measured: the first start, which is an upper bound; not even that: the usual prior.
        """
        if self.starts_s:
            return median(self.starts_s) + self.first_epoch_extra_s
        return DEFAULT_RESIZE_S if self.warm_up_s is None else self.warm_up_s

    @property
    def loading_s(self) -> float:
        """How much longer than others the very first start took."""
        return max((self.warm_up_s or 0.0) - self.start_s, 0.0)

    @property
    def gang_start_s(self) -> float:
        """What it costs to start several workers, or to make one of them several."""
        seen = (*self.resizes_s, *self.gang_starts_s)
        return median(seen) + self.first_epoch_extra_s if seen else self.start_s

    @property
    def start_sd(self) -> float:
        """How far off the cost of starts may be, relative to it."""
        seen = self.starts_s
        if len(seen) < LEAST_STARTS or not any(seen):
            return UNKNOWN_START_SD
        return float(np.hypot(START_SD, stdev(seen) / fmean(seen) / len(seen) ** 0.5))

    @property
    def scaling(self) -> Scaling:
        """Speed by workers as measured; more workers than were tried are believed to gain nothing."""
        known = ((workers, self.speedup(workers)) for workers in self.worker_counts if workers > 1)
        return Scaling(((1, 1.0), *((workers, speedup) for workers, speedup in known if speedup is not None)))


def believe(
    measured: MeasuredProfile,
    *,
    same_machine: bool = True,
    queue_s: SpreadBelief | None = None,
    init_s: SpreadBelief | None = None,
) -> Profile:
    """What a plan may believe after the probe: few epochs leave much in doubt, and the draws show it.

    `same_machine`: trials will run where the probe ran, so that no node is faster or slower than another;
    but its pace may be another by then. `queue_s` and `init_s` were believed of nodes that are launched.
    """
    queue_s, init_s = Spread(0.0) if queue_s is None else queue_s, Spread(0.0) if init_s is None else init_s
    if measured.node is not None and not same_machine:
        queue_s = updated_delay(queue_s, [measured.node.queue_s])
        init_s = updated_delay(init_s, [measured.node.init_s])
    scaling, rng = measured.scaling, child_rng(0, "profile")
    observations = _observations(measured, scaling)
    latency = learn_latency(observations, rng, node_scale=0.0 if same_machine else NODE_SCALE)
    if same_machine or measured.only_lone:
        latency = at_another_time(latency, rng, crowded=measured.only_lone)
    if same_machine:
        return MachineProfile(
            latency=latency,
            scaling=scaling,
            start_s=measured.start_s,
            start_sd=measured.start_sd,
            queue_s=queue_s,
            init_s=init_s,
            slots=measured.slots,
            lone_epoch=beyond_chance(measured.lone_epoch),
            lone_start_s=min(measured.lone_start_s, measured.start_s),
            gang_start_s=measured.gang_start_s,
        )
    return Profile(
        latency=latency,
        scaling=scaling,
        start_s=measured.start_s,
        start_sd=measured.start_sd,
        queue_s=queue_s,
        init_s=init_s,
    )


def _observations(measured: MeasuredProfile, scaling: Scaling) -> list[Observation]:
    """Steady epochs by configuration; if no epoch was ever whole, one worked out from a step's time."""
    timed = [
        Observation(trial=str(config), node="here", epoch_s=epoch_s, speed=scaling.speedup(workers))
        for config in range(len(measured.configs))
        for workers in measured.worker_counts
        for epoch_s in measured.epoch_times_s(workers, config)
    ]
    if timed:
        return timed
    rate = measured.examples_per_s(1)
    if rate is None or measured.examples is None:
        raise InputError(f"the profile of {measured.what} has no epoch and no step.", remedy=_REMEDY)
    return [Observation(trial="0", node="here", epoch_s=measured.examples / rate)]


def profile_json(measured: MeasuredProfile) -> dict[str, Any]:
    """The file's content, and the answer for machines."""
    measures: dict[str, Any] = msgspec.to_builtins(measured)
    fields = {"format": FORMAT, "version": VERSION, **measures}
    return {**fields, CHECK: checksum(fields)}


def write_profile(path: Path, measured: MeasuredProfile) -> None:
    """Write the file whole or not at all."""
    text = json.dumps(profile_json(measured), indent=1, allow_nan=False) + "\n"
    make_private_folder(path.parent)
    write_private(path, text.encode())


def read_profile(path: Path) -> MeasuredProfile:
    """The profile of a file; InputError for anything that is none."""
    where = str(path)
    try:
        fields = read_json(path)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}).", where=where, remedy=_REMEDY) from error
    except UnreadableError as error:
        raise InputError(f"is not JSON: {error}.", where=where, remedy=_REMEDY) from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise InputError("is not a profile.", where=where, remedy=_REMEDY)
    check = fields.pop(CHECK, None)
    if check is not None and check != checksum({"format": FORMAT, **fields}):
        raise InputError(
            f"is not as it was measured: its {CHECK} does not match.",
            where=where,
            remedy=f"{_REMEDY} If you changed it on purpose, remove the line with {CHECK}.",
        )
    if (version := fields.pop("version", None)) != VERSION:
        raise InputError(
            f"is of version {version!r}, and this program reads version {VERSION}.",
            where=where,
            remedy=_REMEDY,
        )
    try:
        measured = msgspec.convert(fields, MeasuredProfile)
    except msgspec.ValidationError as error:
        raise InputError(f"does not read as a profile: {error}.", where=where, remedy=_REMEDY) from error
    _check(measured, where)
    return measured


def spent_usd(path: Path) -> float:
    """What it cost to measure the profile of a file; nothing if there is none."""
    node = read_profile(path).node if path.is_file() else None
    return 0.0 if node is None else node.cost_usd


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _check(measured: MeasuredProfile, where: str) -> None:
    """Times that a plan divides by are positive, and what was seen belongs to a configuration."""
    times = [*(one.epoch_s for one in measured.epochs), *(one.step_s for one in measured.speeds)]
    counts = [measured.slots, *measured.worker_counts, 1 if measured.examples is None else measured.examples]
    starts_s = (*measured.starts_s, *measured.lone_starts_s, *measured.gang_starts_s)
    node = measured.node
    brought_up = () if node is None else (node.queue_s, node.init_s, node.cost_usd)
    delays = [*starts_s, *measured.resizes_s, measured.warm_up_s or 0.0, *brought_up]
    if not all(0.0 < time_s < float("inf") for time_s in times):
        raise InputError("an epoch or step has a time that is not above 0.", where=where, remedy=_REMEDY)
    if not all(0.0 <= delay_s < float("inf") for delay_s in delays):
        raise InputError("a start has a negative time or cost.", where=where, remedy=_REMEDY)
    tried = [*(one.config for one in measured.epochs), *(one.config for one in measured.failed)]
    if min(counts) < 1 or any(not 0 <= config < len(measured.configs) for config in tried):
        raise InputError("a count is below 1, or an epoch has no configuration.", where=where, remedy=_REMEDY)


LEAST_OTHERS = 3
"""Points that a model is fitted to when another is left out."""


def fit_speed(speeds: Sequence[SpeedSample]) -> AllReduceSpeed | None:
    """The model of a step's time; None of no steps."""
    return fit_all_reduce(speeds) if speeds else None


@dataclass(frozen=True, slots=True)
class FitError:
    """How far the model is from one measured step time, relative to it."""

    sample: SpeedSample
    fitted_s: float
    residual: float
    left_out: float | None
    """The error of a model fitted to all others; None: too few others, or none with as many workers."""


def fit_errors(speeds: Sequence[SpeedSample]) -> tuple[FitError, ...]:
    """The model's error on every measured point, and on each when it is left out."""
    model = fit_speed(speeds)
    if model is None:
        return ()
    errors = []
    for sample in speeds:
        fitted_s = _step_s(model, sample)
        others = [one for one in speeds if one is not sample]
        known = len(others) >= LEAST_OTHERS and any(one.workers == sample.workers for one in others)
        left_out = _step_s(fit_all_reduce(others), sample) / sample.step_s - 1.0 if known else None
        errors.append(FitError(sample, fitted_s, fitted_s / sample.step_s - 1.0, left_out))
    return tuple(errors)


def _step_s(model: AllReduceSpeed, sample: SpeedSample) -> float:
    return float(model.step_s(sample.nodes, sample.workers, sample.atomic))
