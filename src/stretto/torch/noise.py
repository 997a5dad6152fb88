"""The gradient noise scale, measured on a few steps without making the device wait.

The gradient of a batch of B examples is the true gradient G plus noise: E|g_B|^2 = |G|^2 + S / B, with S
the trace of one example's gradient covariance. At the initial batch M0: sqr = |G|^2, var = S / M0. Unbiased
estimates of both come from gradients of different batches at the same parameters:

- Several workers: the mean of |g|^2 over their shares (small) and the exchanged gradient (big) give
  |G|^2 = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)
  S     = (|g_small|^2 - |g_big|^2) / (1 / B_small - 1 / B_big)
- One worker with several passes: the gradient of its first pass, a, and that of the rest, b, give
  |G|^2 = a.b and S = |a - b|^2 / (1 / B_a + 1 / B_b).
  A worker with one pass per step occasionally splits a step in two (`splits`). Comparing consecutive steps
  would be cheaper, but biased: the second step's parameters depend on the noise of the first, and at ordinary
  learning rates that makes |G|^2 look several times too small.

For Adam and similar optimizers, the gradient is the preconditioned one (rules.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.core.observations import NoiseSample
from stretto.torch.rules import AdamPreconditioner, is_adam_like

EARLY_STEPS, EARLY_PERIOD = 32, 4
"""In the first EARLY_STEPS steps, sample one step in EARLY_PERIOD."""
SAMPLE_PERIOD = 24
"""After these, sample one step in this many, if there are several workers or passes to compare."""
SPLIT_BUDGET = 0.0075
"""With one worker and one pass, split steps may take at most this share of the time."""
LEAST_PERIOD = 4
"""Even if splitting is cheap, split at most one step in this many."""
FRESH_SAMPLES, FRESH_PERIOD = 16, 8
"""Away from the initial batch, every learning rate depends on the estimate, and early in training the noise
changes by large factors. So a single worker then splits FRESH_SAMPLES steps each time the number of steps
doubles, but at most one in FRESH_PERIOD. After a while this is less than SPLIT_BUDGET allows."""
UNKNOWN_COST = 1.5
"""Assumed cost of a split, in plain steps, before it was measured. If a step is bound by kernel launches,
half a batch takes as long as a whole one."""
SMOOTHING = 0.998
"""Decay of a sample's weight per step at the initial batch."""
LEAST_KEPT = 0.9
"""Minimum weight left when the next sample comes, so that enough samples are averaged."""
TYPICAL_KEPT = 0.9
"""Decay of the typical S, which samples are weighted by."""
FEWEST_SAMPLES = 6
"""With fewer samples, batch sizes do not depend on the estimate."""
READ_STEPS = 4
"""Read results this many steps late, so that we never wait for the GPU."""
LEAST_NOISE = 1e-6
"""Minimum of a sample's S at the initial batch, as a share of |G|^2; avoids a division by 0."""

State = dict[str, Any]
"""Plain numbers by name, and lists of them, so that torch.load(.., weights_only=True) can read it."""


Comparison = Literal["shares", "passes"]
"""What was compared: workers' shares with the total, or the first pass with the rest."""


class NoiseEstimator:
    """Running estimates of the gradient's squared norm and variance for the parameters of one optimizer.

    In a sampled step, call these before the optimizer steps:

    - with several workers: `part` for the gradients of this worker's share, as they become ready; then sum
      `part_sum` over workers;
    - with one worker and several passes: `first_pass` for the gradients of the first pass;
    - in both cases, at the end: `total`.

    Gradients are means over examples, times `loss_scale`. Ranks that make the same calls have the same
    estimate at every step, so learning rates may depend on it.
    """

    def __init__(self, optimizer: Optimizer, initial_batch: int) -> None:
        self._initial_batch = initial_batch
        self._preconditioner = AdamPreconditioner(optimizer) if is_adam_like(optimizer) else None
        self._part: Tensor | None = None
        self._first: dict[Tensor, Tensor] = {}
        """The first pass's gradients, by parameter."""
        self._memory: dict[Tensor, Tensor] = {}
        """Buffers for these copies: allocating new memory would take longer than copying."""
        self._queue: list[_Measured] = []
        self._average = _Average()
        self._cautious: NoiseSample | None = None

    @staticmethod
    def compares(step: int) -> bool:
        """Whether to sample this step, which has several shares or passes anyway."""
        return step % EARLY_PERIOD == 0 if step < EARLY_STEPS else _one_of(SAMPLE_PERIOD, step)

    @staticmethod
    def splits(step: int, cost: float | None, *, initial: bool) -> bool:
        """Whether a single worker should split this step in two passes, at an extra cost of `cost` steps.

        `initial` says whether the batch is the initial one.
        """
        if step < EARLY_STEPS:
            return step % EARLY_PERIOD == 0
        cost = UNKNOWN_COST if cost is None else cost
        period = max(math.ceil(cost / SPLIT_BUDGET), LEAST_PERIOD)
        if not initial:
            doubled = 1 << (step.bit_length() - 1)  # the last power of two passed
            period = min(period, max(doubled // FRESH_SAMPLES, FRESH_PERIOD))
        return _one_of(period, step)

    @torch.no_grad()
    def part(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Add the squared norm of some parameters' gradients over this worker's share."""
        norm = self._squared_norm(parameters, gradients)
        self._part = norm if self._part is None else self._part + norm

    def part_sum(self) -> Tensor:
        """The sum of the `part`s since the last `total`: a 0-d tensor on their device."""
        return torch.zeros(()) if self._part is None else self._part

    @torch.no_grad()
    def first_pass(
        self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], *, times: int = 1
    ) -> None:
        """Keep some parameters' gradients of the first pass, multiplied by `times`."""
        for one, gradient in zip(parameters, gradients, strict=True):
            if one not in self._memory:
                self._memory[one] = torch.empty_like(gradient)
            self._first[one] = self._memory[one]
        if parameters:
            kept = [self._memory[one] for one in parameters]
            torch._foreach_copy_(kept, list(gradients))
            if times != 1:
                torch._foreach_mul_(kept, float(times))

    @torch.no_grad()
    def total(
        self,
        parameters: Sequence[Tensor],
        *,
        step: int,
        batch: int,
        part_batch: float,
        parts: int = 1,
        part_sqr: Tensor | None = None,
        loss_scale: float | Tensor = 1.0,
    ) -> None:
        """Add a sample, from the gradient of the whole step over `batch` examples.

        `part_batch` is the number of examples of the first pass, or of each of `parts` workers' shares (the
        harmonic mean if they differ). `part_sqr` is `part_sum` summed over workers; None: this worker's own.
        """
        small_sqr, self._part = self._part if part_sqr is None else part_sqr, None
        first, self._first = self._first, {}
        gradients = {one: one.grad for one in parameters if one.grad is not None}
        if not gradients or batch <= part_batch:
            return
        if small_sqr is not None:
            self._memory = {}
            big_sqr = self._squared_norm(list(gradients), list(gradients.values()))
            norms = torch.stack(((small_sqr / parts).to(big_sqr), big_sqr))
            self._add(step, "shares", part_batch, batch, norms / loss_scale**2)
        elif first:
            self._add(step, "passes", part_batch, batch, self._norms_of(first, gradients) / loss_scale**2)

    def read(self, step: int) -> None:
        """Add results measured READ_STEPS ago. They are computed by now, and all ranks read them now."""
        if self._queue and self._queue[0].step <= step - READ_STEPS:
            self._take(self._queue.pop(0))

    def sample(self) -> NoiseSample | None:
        """The current estimate; None before the first. Never waits for the device."""
        return self._average.sample(self._initial_batch)

    def cautious(self) -> NoiseSample | None:
        """The estimate for choosing batch sizes; None while there are too few samples.

        If the gradient cannot be told from noise, |G|^2 may be estimated as 0, which would justify any batch.
        So we use at least its standard error.
        """
        return self._cautious

    def state_dict(self) -> State:
        """The whole state; waits for pending results."""
        return {**asdict(self._average), "pending": [measured.numbers() for measured in self._queue]}

    def load_state_dict(self, state: State) -> None:
        """Resume from a `state_dict` of any rank."""
        self._average = _Average(**{key: value for key, value in state.items() if key != "pending"})
        self._judge()
        self._queue = [
            _Measured(step, source, part_batch, batch, torch.tensor(norms, dtype=torch.float64))
            for step, source, part_batch, batch, *norms in state["pending"]
        ]
        self._part, self._first = None, {}

    def _norms_of(self, first: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor]) -> Tensor:
        """Squared norms of the first pass's gradient, the total and their difference. Overwrites `first`."""
        common = [one for one in first if one in gradients]
        rows = []
        for before, whole in self._chunks(
            common, [first[one] for one in common], [gradients[one] for one in common]
        ):
            one, two = _squared_norm(before), _squared_norm(whole)
            torch._foreach_sub_(before, whole)
            rows.append(torch.stack((one, two, _squared_norm(before))))
        return torch.stack(rows).sum(dim=0) if rows else torch.zeros(3)

    def _squared_norm(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        norms = [_squared_norm(chunk) for (chunk,) in self._chunks(parameters, gradients)]
        return torch.stack(norms).sum() if norms else torch.zeros((), device=gradients[0].device)

    def _chunks(
        self, parameters: Sequence[Tensor], *columns: Sequence[Tensor]
    ) -> Iterator[list[list[Tensor]]]:
        """Gradients in chunks; for Adam, preconditioned."""
        if self._preconditioner is not None:
            yield from self._preconditioner.divided(parameters, *columns)
        elif parameters:
            yield [list(column) for column in columns]

    def _add(self, step: int, source: Comparison, part_batch: float, batch: int, norms: Tensor) -> None:
        if not norms.is_cuda:
            self._take(_Measured(step, source, part_batch, batch, norms))
            return
        host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        host.copy_(norms, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._queue.append(_Measured(step, source, part_batch, batch, host, done))

    def _take(self, measured: _Measured) -> None:
        self._average.add(measured, self._initial_batch)
        self._judge()

    def _judge(self) -> None:
        """Update the cautious estimate; it holds until the next sample."""
        known = self._average.count >= FEWEST_SAMPLES
        self._cautious = self._average.sample(self._initial_batch, cautious=True) if known else None


@dataclass(frozen=True, slots=True)
class _Measured:
    """The squared norms of one sampled step, maybe still on their way from the device."""

    step: int
    source: Comparison
    part_batch: float
    """Examples of a share, or of the first pass."""
    batch: int
    norms: Tensor
    """(small, big), or (first, total, their difference); valid once `done` has happened."""
    done: torch.cuda.Event | None = None

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return [float(norm) for norm in self.norms.tolist()]

    def numbers(self) -> list[float | str]:
        return [self.step, self.source, self.part_batch, self.batch, *self.read()]

    def estimate(self) -> tuple[float, float]:
        """|G|^2 and S."""
        part, batch, norms = self.part_batch, self.batch, self.read()
        if self.source == "shares":
            small, big = norms
            return (batch * big - part * small) / (batch - part), (small - big) / (1 / part - 1 / batch)
        # With first pass a and whole t, the rest is b = (B t - B_a a) / B_b and a - b = (a - t) B / B_b.
        one, two, apart = norms
        rest = batch - part
        dot = (one + two - apart) / 2
        return (batch * dot - part * one) / rest, apart * (batch / rest) ** 2 / (1 / part + 1 / rest)


@dataclass(slots=True)
class _Average:
    """Weighted means of the samples' |G|^2 and S; only their ratio matters.

    During training both change by orders of magnitude, much more than their ratio. The error of a sample's
    |G|^2 at batch B is about S / B. So a sample has the weight B^2 / (typical S), times SMOOTHING ** (its age
    in steps at the initial batch).
    """

    count: float = 0.0
    weight: float = 0.0
    sqr_sum: float = 0.0
    trace_sum: float = 0.0
    square_sum: float = 0.0
    """Sum of (|G|^2 B / S)^2, terms with similar errors."""
    typical: float = 0.0
    """A running mean of S."""
    step: int = 0

    def add(self, measured: _Measured, initial_batch: int) -> None:
        sqr, trace = measured.estimate()
        if not (math.isfinite(sqr) and math.isfinite(trace)) or not any(measured.read()):
            return  # an overflow, or all parameters are still in Adam's warm-up
        scale = measured.batch / initial_batch
        size = abs(trace) + LEAST_NOISE * initial_batch * abs(sqr)
        typical = self.typical or size
        self.typical = TYPICAL_KEPT * typical + (1 - TYPICAL_KEPT) * size
        kept = max(SMOOTHING ** (max(measured.step - self.step, 0) * scale), LEAST_KEPT)
        weight = scale**2 / typical
        self.count = kept * self.count + 1.0
        self.weight = kept * self.weight + weight
        self.sqr_sum = kept * self.sqr_sum + weight * sqr
        self.trace_sum = kept * self.trace_sum + weight * trace
        self.square_sum = kept * self.square_sum + (sqr * scale / typical) ** 2
        self.step = measured.step

    def sample(self, initial_batch: int, *, cautious: bool = False) -> NoiseSample | None:
        if not self.count:
            return None
        # Estimates can be negative, but the true values cannot.
        sqr, trace = self.sqr_sum / self.weight, max(self.trace_sum / self.weight, 0.0)
        least = self._ratio_error() * trace if cautious else 0.0
        return NoiseSample(sqr=max(sqr, least), var=trace / initial_batch)

    def _ratio_error(self) -> float:
        """The standard error of |G|^2 / S.

        Let z = |G|^2 B / S of a sample, and r the ratio. Then z - r B has the same variance v at all batch
        sizes. r is fitted with weights B^2, whose sum is about `trace_sum`, so its variance is v / that sum.
        """
        if self.trace_sum <= 0:
            return 0.0
        ratio = self.sqr_sum / self.trace_sum
        rest = self.square_sum - ratio * self.sqr_sum
        return math.sqrt(max(rest, 0.0) / self.count / self.trace_sum)


def _one_of(period: int, step: int) -> bool:
    """Whether to take this step: one per period, at a pseudo-random place, at least half a period apart.

    With a fixed place, all taken steps could be the last ones of a pass, which cannot be sampled.
    """
    number, place = divmod(step, period)
    return place == crc32(number.to_bytes(8)) % (period // 2)


def _squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    precision = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=precision)  # noqa: SLF001
    return torch.stack(norms).square().sum()
