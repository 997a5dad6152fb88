"""The gradient noise scale, measured on a few steps without making the device wait.

The gradient of a batch of B examples is the true gradient G plus noise: E|g_B|^2 = |G|^2 + S / B, with S
the trace of one example's gradient covariance. At the initial batch M0: sqr = |G|^2, var = S / M0. Both are
had unbiased from gradients of different batches:

- Several workers: the mean of |g|^2 over their shares (small) and the exchanged gradient (big) give
  |G|^2 = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)
  S     = (|g_small|^2 - |g_big|^2) / (1 / B_small - 1 / B_big)
- Two gradients a, b of separate examples give |G|^2 = a.b and S = |a - b|^2 / (1 / B_a + 1 / B_b). One worker
  with several passes compares the first with the rest; with one pass, two consecutive steps. Between those
  the parameters move, and at ordinary learning rates that makes |G|^2 look several times too small, so a
  worker does better to make two passes of a step now and then (`splits`).

For Adam and its like the gradient is the one that they step with (adam.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.core.observations import NoiseSample
from stretto.torch.adam import AdamPreconditioner, is_adam_like

SAMPLE_PERIOD = 24
"""Of so many steps two are sampled, one after the other: the differenced source needs a pair."""
SPLIT_PERIOD = 3 * SAMPLE_PERIOD
"""A lone worker splits one step in so many: at worst, where a pass of half the batch takes as long, 1.4 %."""
EARLY_STEPS, EARLY_PERIOD = 600, 12
"""At first it splits more often: until some samples are there, nothing is known."""
SMOOTHING = 0.999
"""What is left of a sample's weight after one step at the initial batch."""
LEAST_KEPT = 0.95
"""But so much is left when the next sample comes: at large batches there would be too few to average."""
FEWEST_SAMPLES = 8
"""Fewer say nothing that a batch size should depend on."""
CAUTION = 1.0
"""Standard errors added to the squared gradient, so that what is not sure does not count as noise."""
MIN_SQR, MIN_VAR = 0.0, 1e-6
"""Estimates of these can fall below zero, the truth cannot."""

State = dict[str, Any]
"""Plain numbers by name, and lists of them: a checkpoint with it loads without unpickling."""


Source = Literal["shares", "passes", "steps"]
"""What was compared: workers' shares with the whole, the first pass with the rest, one step with the next."""


class NoiseEstimator:
    """Running estimates of the gradient's squared norm and variance for the parameters of one optimizer.

    On a step that it `wants`, before the optimizer's: `total`. Before that, where there are several workers,
    `part` for the gradients of this one's share, as they become ready; and `part_sum`, which the caller sums
    over workers. Where one worker makes several passes, `first_pass` after the first, also bit by bit.

    Gradients are means over examples, times `loss_scale`. Ranks that make the same calls hold the same
    estimate at every step, so that a learning rate may depend on it.
    """

    def __init__(self, optimizer: Optimizer, initial_batch: int) -> None:
        self._initial_batch = initial_batch
        self._preconditioner = AdamPreconditioner(optimizer) if is_adam_like(optimizer) else None
        self._part: Tensor | None = None
        self._kept: _Kept | None = None
        self._memory: dict[Tensor, Tensor] = {}
        self._queue: list[_Measured] = []
        self._average = _Average()

    @staticmethod
    def wants(step: int) -> bool:
        """Whether this step is sampled; a matter of its number only."""
        return step % SAMPLE_PERIOD < 2 or NoiseEstimator.splits(step)

    @staticmethod
    def splits(step: int) -> bool:
        """Whether a lone worker should make this step in two passes, to be compared without bias."""
        return step % (EARLY_PERIOD if step < EARLY_STEPS else SPLIT_PERIOD) == 0

    @torch.no_grad()
    def part(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Adds the squared norm of some parameters' gradients over this worker's share."""
        norm = self._squared_norm(parameters, gradients)
        self._part = norm if self._part is None else self._part + norm

    def part_sum(self) -> Tensor:
        """The squared norm of the parts given since the last `total`: a 0-d tensor on their device."""
        return torch.zeros(()) if self._part is None else self._part

    @torch.no_grad()
    def first_pass(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Keeps some parameters' gradients over the first of several passes."""
        if self._kept is None or self._kept.step is not None:
            self._kept = _Kept()
        self._kept.take(gradients, parameters, self._memory)

    @torch.no_grad()
    def total(
        self,
        parameters: Sequence[Tensor],
        *,
        step: int,
        batch: int,
        part_batch: float | None = None,
        parts: int = 1,
        part_sqr: Tensor | None = None,
        loss_scale: float | Tensor = 1.0,
    ) -> None:
        """Takes the gradient of the whole step, over `batch` examples.

        `part_batch` examples made up the first pass, or each of `parts` workers' shares (their harmonic mean
        where they differ). `part_sqr` is the sum of `part_sum` over workers; None: this one's own.
        """
        small_sqr, self._part = self._part if part_sqr is None else part_sqr, None
        self._read_old(step)
        now = _Step(step, batch, loss_scale)
        gradients = {one: one.grad for one in parameters if one.grad is not None}
        if part_batch is None:
            self._compare_steps(now, gradients)
        elif small_sqr is None:
            self._compare_passes(now, gradients, part_batch)
        else:
            self._memory, self._kept = {}, None
            self._compare_shares(now, gradients, part_batch, small_sqr / parts)

    def sample(self) -> NoiseSample | None:
        """The present estimate, or None before the first; never waits for the device."""
        return self._average.sample(self._initial_batch)

    def cautious(self) -> NoiseSample | None:
        """The estimate with the gradient as large as it may well be; None while too little is known.

        A squared gradient that is lost in the noise, estimated as 0, would make every batch look worthwhile.
        """
        return self._average.sample(self._initial_batch, caution=CAUTION, fewest=FEWEST_SAMPLES)

    def state_dict(self) -> State:
        """Everything but a gradient kept for the next step; waits for what is still being computed."""
        return {**asdict(self._average), "pending": [measured.numbers() for measured in self._queue]}

    def load_state_dict(self, state: State) -> None:
        """Goes on from a `state_dict`, of whichever rank."""
        self._average = _Average(**{key: value for key, value in state.items() if key != "pending"})
        self._queue = [
            _Measured(step, source, other_batch, batch, torch.tensor(norms, dtype=torch.float64))
            for step, source, other_batch, batch, *norms in state["pending"]
        ]
        self._part, self._kept = None, None

    def _compare_steps(self, now: _Step, gradients: dict[Tensor, Tensor]) -> None:
        """Keeps the first gradient of a pair, and compares the second with it."""
        kept, self._kept = self._kept, None
        if not self._average.admits("steps", now.number, now.batch / self._initial_batch):
            return
        if kept is not None and kept.step is not None and kept.step.number + 1 == now.number:
            if not now.has_scale_of(kept.step):
                kept.multiply(now.loss_scale / kept.step.loss_scale)
            self._add(now, "steps", kept.step.batch, self._norms_of(kept, gradients))
        elif self.wants(now.number + 1):
            self._kept = _Kept(now.copied())
            self._kept.take(list(gradients.values()), list(gradients), self._memory)

    def _compare_passes(self, now: _Step, gradients: dict[Tensor, Tensor], first_batch: float) -> None:
        kept, self._kept = self._kept, None
        if kept is not None and kept.step is None and now.batch > first_batch:
            self._add(now, "passes", first_batch, self._norms_of(kept, gradients))

    def _compare_shares(
        self, now: _Step, gradients: dict[Tensor, Tensor], share_batch: float, small_sqr: Tensor
    ) -> None:
        if gradients and now.batch > share_batch:
            big_sqr = self._squared_norm(list(gradients), list(gradients.values()))
            self._add(now, "shares", share_batch, torch.stack((small_sqr.to(big_sqr), big_sqr)))

    def _norms_of(self, kept: _Kept, gradients: dict[Tensor, Tensor]) -> Tensor:
        """Squared norms of kept and present gradient and of their difference; uses the kept one up."""
        common = [one for one in kept.copies if one in gradients]
        rows = []
        for before, present in self._chunks(
            common, [kept.copies[one] for one in common], [gradients[one] for one in common]
        ):
            one, two = _squared_norm(before), _squared_norm(present)
            torch._foreach_sub_(before, present)
            rows.append(torch.stack((one, two, _squared_norm(before))))
        return torch.stack(rows).sum(dim=0) if rows else torch.zeros(3)

    def _squared_norm(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        norms = [_squared_norm(chunk) for (chunk,) in self._chunks(parameters, gradients)]
        return torch.stack(norms).sum() if norms else torch.zeros((), device=gradients[0].device)

    def _chunks(
        self, parameters: Sequence[Tensor], *columns: Sequence[Tensor]
    ) -> Iterator[list[list[Tensor]]]:
        """Lists of gradients as the optimizer sees them, perhaps bit by bit."""
        if self._preconditioner is not None:
            yield from self._preconditioner.divided(parameters, *columns)
        elif parameters:
            yield [list(column) for column in columns]

    def _add(self, now: _Step, source: Source, other_batch: float, norms: Tensor) -> None:
        row = norms / now.loss_scale**2
        if not row.is_cuda:
            measured = _Measured(now.number, source, other_batch, now.batch, row)
            self._average.add(measured, self._initial_batch)
            return
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        host.copy_(row, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._queue.append(_Measured(now.number, source, other_batch, now.batch, host, done))

    def _read_old(self, step: int) -> None:
        """Averages what the last pair measured: long computed by now, and read by all ranks at this step."""
        old = [measured for measured in self._queue if measured.step < step - 1]
        self._queue = [measured for measured in self._queue if measured.step >= step - 1]
        for measured in old:
            self._average.add(measured, self._initial_batch)


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    batch: int
    loss_scale: float | Tensor

    def copied(self) -> _Step:
        """With the loss scale as it is now: a scaler changes its tensor in place."""
        scale = self.loss_scale.clone() if isinstance(self.loss_scale, Tensor) else self.loss_scale
        return replace(self, loss_scale=scale)

    def has_scale_of(self, other: _Step) -> bool:
        """Whether both loss scales are the same number; of tensors that is not known without waiting."""
        if isinstance(self.loss_scale, Tensor) or isinstance(other.loss_scale, Tensor):
            return False
        return self.loss_scale == other.loss_scale


@dataclass(slots=True)
class _Kept:
    """Copies of gradients, to be compared with later ones."""

    step: _Step | None = None
    """Which step's; None: they are of the first pass of the present one."""
    copies: dict[Tensor, Tensor] = field(default_factory=dict)

    def take(
        self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], memory: dict[Tensor, Tensor]
    ) -> None:
        """Copies into `memory`, which serves every time: fresh memory costs more than the copy."""
        for one, gradient in zip(parameters, gradients, strict=True):
            if one not in memory:
                memory[one] = torch.empty_like(gradient)
            self.copies[one] = memory[one]
        if parameters:
            torch._foreach_copy_([memory[one] for one in parameters], list(gradients))

    def multiply(self, factor: float | Tensor) -> None:
        if self.copies:
            torch._foreach_mul_(list(self.copies.values()), factor)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Squared norms on their way from the device, and what they are of."""

    step: int
    source: Source
    other_batch: float
    """Of a share, of the first pass, or of the step before."""
    batch: int
    norms: Tensor
    """In the host's memory as soon as `done`: (small, big), or (kept, present, their difference)."""
    done: torch.cuda.Event | None = None

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return [float(norm) for norm in self.norms.tolist()]

    def numbers(self) -> list[float | str]:
        return [self.step, self.source, self.other_batch, self.batch, *self.read()]

    def estimate(self) -> tuple[float, float]:
        """|G|^2 and S."""
        other, batch, norms = self.other_batch, self.batch, self.read()
        if self.source == "shares":
            small, big = norms
            return (batch * big - other * small) / (batch - other), (small - big) / (1 / other - 1 / batch)
        one, two, apart = norms
        dot = (one + two - apart) / 2
        if self.source == "steps":
            return dot, apart / (1 / other + 1 / batch)
        # With first pass a and whole t, the rest is b = (B t - B_a a) / B_b and a - b = (a - t) B / B_b.
        rest = batch - other
        return (batch * dot - other * one) / rest, apart * (batch / rest) ** 2 / (1 / other + 1 / rest)


@dataclass(slots=True)
class _Average:
    """Mean of the samples, each counting SMOOTHING ** (its age in steps at the initial batch)."""

    sqr_sum: float = 0.0
    square_sum: float = 0.0
    """Of the squares of what `sqr_sum` sums."""
    trace_sum: float = 0.0
    weight: float = 0.0
    step: int = 0
    biased: bool = False

    def admits(self, source: Source, step: int, scale: float) -> bool:
        """Biased samples count only until there are better ones, and again when those are long past."""
        better = self.weight > 0 and not self.biased
        return source != "steps" or not better or (step - self.step) * scale > 1 / (1 - SMOOTHING)

    def add(self, measured: _Measured, initial_batch: int) -> None:
        scale = measured.batch / initial_batch
        sqr, trace = measured.estimate()
        if not (math.isfinite(sqr) and math.isfinite(trace)) or not any(measured.read()):
            return  # an overflow, or no parameter that counts yet
        if not self.admits(measured.source, measured.step, scale):
            return
        if self.biased != (measured.source == "steps"):
            self.sqr_sum = self.square_sum = self.trace_sum = self.weight = 0.0
        self.biased = measured.source == "steps"
        age = max(measured.step - self.step, 0) * scale
        kept = max(SMOOTHING**age, LEAST_KEPT)
        self.sqr_sum = kept * self.sqr_sum + sqr
        self.square_sum = kept * self.square_sum + sqr**2
        self.trace_sum = kept * self.trace_sum + trace
        self.weight = kept * self.weight + 1.0
        self.step = measured.step

    def sample(self, initial_batch: int, *, caution: float = 0.0, fewest: int = 0) -> NoiseSample | None:
        if not self.weight or self.weight < fewest:
            return None
        sqr = self.sqr_sum / self.weight
        error = math.sqrt(max(self.square_sum / self.weight - sqr**2, 0.0) / self.weight)
        var = self.trace_sum / self.weight / initial_batch
        return NoiseSample(sqr=max(sqr, MIN_SQR) + caution * error, var=max(var, MIN_VAR))


def _squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    precision = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=precision)  # noqa: SLF001
    return torch.stack(norms).square().sum()
