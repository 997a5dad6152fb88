"""Checks that all workers still train the same model: equal parameters and optimizer settings.

All workers apply the same averaged gradient, so their parameters stay equal to the last bit. They diverge
only if the user's code treats workers differently. Example: a learning rate computed from the script's own
counter, which starts at 0 in a worker that joins. A fingerprint is a hash of every parameter group's settings
and of a sample of every parameter. Buffers and random states may differ and are left out.

Fingerprints are compared when a group forms, at its first exchanges of gradients (which catches a wrong
learning rate before it is used), and then rarely enough to take at most a share COST of the time.
"""

from __future__ import annotations

import hashlib
import io
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.torch.group import DivergedError, Group
from stretto.torch.pack import as_bytes
from stretto.torch.step_layout import CurrentStep
from stretto.torch.stepper import Stepper

COST = 0.0005
FIRST_EXCHANGES = (1, 2, 3, 5, 9)
"""After these exchanges of a new group, fingerprints are compared."""
_SAMPLE = 64
"""Elements compared per parameter; different ones each time."""
_SETTING_TOLERANCE = 1e-5
_PARAMETER_TOLERANCE = 1e-4
"""Relative. Rounding may differ between processors and numbers of threads."""
_ROUNDINGS = 8
"""For types of low precision, differences up to this many roundings are tolerated."""
_SHOWN_RANKS = 4
_RECENT = 5

_OWN_COUNTER = (
    "A worker that joins runs the script from the top, so the script's own counters begin at 0 there. "
    "Compute rates from run.step or run.progress, keep other values with run.keep(), and give schedulers to "
    "run.prepare()."
)
_OWN_CHANGE = (
    "Give the model and its optimizer to run.prepare(). Change parameters only by the optimizer's steps, in "
    "the same way on every worker. Keep counters with run.step and run.keep()."
)

Value = float | str | None | tuple[Any, ...]
Names = Callable[[], dict[int, str]]
"""Returns the names of parameters, by id."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a parameter group, such as the learning rate; it must be equal on all workers."""

    label: str
    value: Value


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal on all workers."""

    settings: list[Setting]
    shapes: list[str]
    """The shapes of the parameters."""
    samples: list[Tensor]

    def digests(self) -> tuple[int, int]:
        """Hashes of the settings and of the parameters."""
        sampled = hashlib.blake2b(repr(self.shapes).encode(), digest_size=7)
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for sample in self.samples:
            by_kind.setdefault((sample.device, sample.dtype), []).append(sample)
        for samples in by_kind.values():
            sampled.update(as_bytes(torch.cat(samples)).cpu().numpy().tobytes())
        settings = hashlib.blake2b(repr(self.settings).encode(), digest_size=7)
        return int.from_bytes(settings.digest()), int.from_bytes(sampled.digest())


def fingerprint(optimizers: Sequence[torch.optim.Optimizer], offset: int) -> Fingerprint:
    """The fingerprint of everything that these optimizers train; `offset` selects the sampled elements."""
    settings, shapes, samples = [], [], []
    for number, optimizer in enumerate(optimizers):
        owner = f" of optimizer {number} ({type(optimizer).__name__})" if len(optimizers) > 1 else ""
        for place, group in enumerate(optimizer.param_groups):
            for name, given in group.items():
                if name != "params" and (value := _plain(given)) is not _UNKNOWN:
                    settings.append(Setting(f"{_TITLES.get(name, name)} of group {place}{owner}", value))
            for parameter in group["params"]:
                shapes.append(str(tuple(parameter.shape)))
                samples.append(_sample(parameter, offset))
    return Fingerprint(settings, shapes, samples)


class DivergenceCheck:
    """Compares the workers' fingerprints. If they differ, all workers fail with DivergedError at one step."""

    def __init__(self, group: Group, current: CurrentStep, steppers: Sequence[Stepper], names: Names) -> None:
        self._group = group
        self._current = current
        self._steppers = steppers
        self._names = names
        self._exchanges = 0
        self._next = FIRST_EXCHANGES[0]
        self._compared_at = 0
        self._compared_s = 0.0
        self._costs_s: deque[float] = deque(maxlen=_RECENT)
        self._steps_s: deque[float] = deque(maxlen=_RECENT)

    def regrouped(self) -> None:
        """A new group has formed, and all members have the same state."""
        self._exchanges, self._next = 0, FIRST_EXCHANGES[0]
        self._steps_s.clear()
        self._compare()

    def exchanged(self) -> None:
        """All workers have exchanged the gradients of a step."""
        self._exchanges += 1
        if self._exchanges >= self._next:
            self._compare()

    def _compare(self) -> None:
        if self._group.world == 1 or not self._steppers:
            return
        began_s = time.perf_counter()
        if done := self._exchanges - self._compared_at if self._exchanges else 0:
            self._steps_s.append((began_s - self._compared_s) / done)
        own = fingerprint(self._optimizers, self._current.updates)
        everyones = self._group.gather([*own.digests(), self._following()])
        self._next = everyones[0][2]
        if len({(settings, parameters) for settings, parameters, _ in everyones}) > 1:
            self._look_closer(own)
        self._compared_at, self._compared_s = self._exchanges, time.perf_counter()
        self._costs_s.append(self._compared_s - began_s)

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [stepper.optimizer for stepper in self._steppers]

    def _following(self) -> int:
        """The number of the exchange after which to compare next; rank 0's answer counts."""
        for number in FIRST_EXCHANGES:
            if number > self._exchanges:
                return number
        usual_s = statistics.mean(self._costs_s)
        return self._exchanges + interval(max(usual_s, self._costs_s[-1]), min(self._steps_s))

    def _look_closer(self, own: Fingerprint) -> None:
        """Raise DivergedError on every worker if they differ by more than rounding."""
        file = io.BytesIO()
        settings = [[one.label, one.value] for one in own.settings]
        samples = [sample.cpu().clone() for sample in own.samples]  # torch.save would write the whole storage
        torch.save({"settings": settings, "shapes": own.shapes, "samples": samples}, file)
        everyones = [_read(one) for one in self._group.gather_bytes(file.getvalue())]
        if problem := difference(everyones, self._parameter_names()):
            self._current.refusal = DivergedError(
                f"the workers do not train the same model any more, after step {self._current.updates}: "
                f"{problem.text}.",
                remedy=_OWN_COUNTER if problem.is_setting else _OWN_CHANGE,
            )
            raise self._current.refusal

    def _parameter_names(self) -> list[str]:
        known = self._names()
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return [known.get(id(parameter), str(place)) for place, parameter in enumerate(parameters)]


def interval(cost_s: float, step_s: float) -> int:
    """Steps between two comparisons, so that they take a share COST of the time."""
    return max(math.ceil(cost_s / (COST * max(step_s, 1e-9))), 1)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference found between workers."""

    text: str
    is_setting: bool


def difference(everyones: Sequence[Fingerprint], names: Sequence[str]) -> Divergence | None:
    """The first difference between the workers; None if there is only rounding."""
    if len({tuple(setting.label for setting in one.settings) for one in everyones}) > 1:
        counts = [str(len(one.settings)) for one in everyones]
        return Divergence(f"the number of optimizer settings: {_by_rank(counts)}", is_setting=True)
    for values in zip(*(one.settings for one in everyones), strict=True):
        if any(_differ(values[0].value, one.value) for one in values):
            shown = _by_rank(_text(one.value) for one in values)
            return Divergence(f"{values[0].label}: {shown}", is_setting=True)
    if len({tuple(one.shapes) for one in everyones}) > 1:
        shown = _by_rank(f"{len(one.shapes)} parameters" for one in everyones)
        return Divergence(f"what the optimizers train: {shown}", is_setting=False)
    for name, *samples in zip(names, *(one.samples for one in everyones), strict=True):
        if (place := _differing(samples)) is not None:
            shown = _by_rank(f"{float(_real(sample)[place]):.6g}" for sample in samples)
            return Divergence(f"a value of parameter {name}: {shown}", is_setting=False)
    return None


_UNKNOWN = object()
_TITLES = {"lr": "learning rate"}


def _plain(value: Any) -> Any:
    """A setting as a value that can be compared, or _UNKNOWN."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list):
        parts = tuple(_plain(one) for one in value)
        return _UNKNOWN if _UNKNOWN in parts else parts
    return _UNKNOWN


@torch.no_grad()
def _sample(parameter: Tensor, offset: int) -> Tensor:
    bare = parameter.detach()
    if not bare.is_contiguous() and bare.dim() == 4:
        bare = bare.permute(0, 2, 3, 1)  # avoids copying channels-last weights
    flat = bare.reshape(-1)
    stride = max(flat.numel() // _SAMPLE, 1)
    return flat[offset % stride :: stride][:_SAMPLE]


def _read(content: bytes) -> Fingerprint:
    read = torch.load(io.BytesIO(content), weights_only=True)
    return Fingerprint([Setting(*one) for one in read["settings"]], read["shapes"], read["samples"])


def _differ(one: Value, other: Value) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) != math.isnan(other)
        return not math.isclose(one, other, rel_tol=_SETTING_TOLERANCE)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return any(_differ(*pair) for pair in zip(one, other, strict=True))
    return one != other


def _differing(samples: Sequence[Tensor]) -> int | None:
    """The place where samples of a parameter differ most between workers; None if only by rounding."""
    if samples[0].numel() == 0:
        return None
    together = torch.stack([_real(sample) for sample in samples])
    broken = together.isnan() | together.isinf()
    if bool((broken != broken[0]).any()):
        return int((broken != broken[0]).any(0).nonzero()[0])
    together = together.masked_fill(broken, 0.0)
    spread = together.amax(0) - together.amin(0)
    kind = samples[0].dtype
    eps = torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0
    tolerance = max(_PARAMETER_TOLERANCE, _ROUNDINGS * eps)
    return int(spread.argmax()) if bool(spread.max() > tolerance * together.abs().max()) else None


def _real(sample: Tensor) -> Tensor:
    return (sample.abs() if sample.is_complex() else sample).to(torch.float64)


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(one) for one in value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _by_rank(values: Iterable[str]) -> str:
    """`0.1 on rank 0, 0.2 on ranks 1 and 2`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    texts = []
    for value, those in list(ranks.items())[:_SHOWN_RANKS]:
        *first, last = those[:_SHOWN_RANKS]
        texts.append(f"{value} on rank{'s' if first else ''} {', '.join(first)}{' and ' * bool(first)}{last}")
    return ", ".join(texts)
