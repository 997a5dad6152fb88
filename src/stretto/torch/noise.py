"""The gradient noise scale, measured on a few steps without making the device wait.

The gradient of a batch of B examples is the true gradient G plus noise: E|g_B|^2 = |G|^2 + S / B, with S
the trace of one example's gradient covariance. At the initial batch M0: sqr = |G|^2, var = S / M0. Both are
had unbiased from gradients of different batches at the same parameters:

- Several workers: the mean of |g|^2 over their shares (small) and the exchanged gradient (big) give
  |G|^2 = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)
  S     = (|g_small|^2 - |g_big|^2) / (1 / B_small - 1 / B_big)
- One worker with several passes: its first, a, and the rest, b, give
  |G|^2 = a.b and S = |a - b|^2 / (1 / B_a + 1 / B_b).
  A worker that makes one pass a step makes two now and then (`splits`). To compare one step with the next
  would be cheaper, but the second one's parameters depend on the first one's noise, and at ordinary learning
  rates that makes |G|^2 look several times too small.

For Adam and its like the gradient is the one that they step with (adam.py).
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
"""At first one step in so many is sampled: until some samples are there, nothing is known."""
SAMPLE_PERIOD = 24
"""Later, where there are workers or passes to compare, one step in so many."""
SPLIT_BUDGET = 0.0075
"""Else, the share of the time that splitting steps may take."""
LEAST_PERIOD = 4
"""But not more often than this, however cheap."""
FRESH_SAMPLES, FRESH_PERIOD = 16, 8
"""At another batch than the initial one every step goes by the estimate, and noise changes by factors in the
course of a training, most at its beginning. So a lone worker then splits so many steps while their number
doubles, though at most one in FRESH_PERIOD. Soon that is less than the budget allows."""
UNKNOWN_COST = 1.5
"""What a split step is taken to add before that was measured, in plain steps: where launching
the work takes longer than the work, a pass of half the batch takes as long as one of the whole."""
SMOOTHING = 0.998
"""What is left of a sample's weight after one step at the initial batch."""
LEAST_KEPT = 0.9
"""But so much is left when the next sample comes, or there would be too few to average."""
TYPICAL_KEPT = 0.9
"""The same for the size of S that samples are seen in relation to, which changes faster."""
FEWEST_SAMPLES = 6
"""Fewer say nothing that a batch size should depend on."""
READ_STEPS = 4
"""A device is never so many steps behind that reading a result of then would keep anybody waiting long."""
LEAST_NOISE = 1e-6
"""A sample's S at the initial batch is taken to be this share of |G|^2 at least, to be divided by."""

State = dict[str, Any]
"""Plain numbers by name, and lists of them: a checkpoint with it loads without unpickling."""


Comparison = Literal["shares", "passes"]
"""What was compared: workers' shares with the whole, or the first pass with the rest."""


class NoiseEstimator:
    """Running estimates of the gradient's squared norm and variance for the parameters of one optimizer.

    On a step that is sampled, before the optimizer's: `total`. Before that, where there are several workers,
    `part` for the gradients of this one's share, as they become ready; and `part_sum`, which the caller sums
    over workers. Where one worker makes several passes, `first_pass` after the first, also bit by bit.

    Gradients are means over examples, times `loss_scale`. Ranks that make the same calls hold the same
    estimate at every step, so that a learning rate may depend on it.
    """

    def __init__(self, optimizer: Optimizer, initial_batch: int) -> None:
        self._initial_batch = initial_batch
        self._preconditioner = AdamPreconditioner(optimizer) if is_adam_like(optimizer) else None
        self._part: Tensor | None = None
        self._first: dict[Tensor, Tensor] = {}
        """The first pass's gradients, by parameter."""
        self._memory: dict[Tensor, Tensor] = {}
        """Where they are copied to every time: fresh memory costs more than the copy."""
        self._queue: list[_Measured] = []
        self._average = _Average()
        self._cautious: NoiseSample | None = None

    @staticmethod
    def compares(step: int) -> bool:
        """Whether to compare the workers' shares, or the passes, of this step."""
        return step % EARLY_PERIOD == 0 if step < EARLY_STEPS else _one_of(SAMPLE_PERIOD, step)

    @staticmethod
    def splits(step: int, cost: float | None, *, initial: bool) -> bool:
        """Whether a lone worker should make this step in two passes, which adds `cost` plain steps.

        `initial` tells whether it has the initial batch.
        """
        if step < EARLY_STEPS:
            return step % EARLY_PERIOD == 0
        cost = UNKNOWN_COST if cost is None else cost
        period = max(math.ceil(cost / SPLIT_BUDGET), LEAST_PERIOD)
        if not initial:
            doubled = 1 << (step.bit_length() - 1)  # the power of two that was passed last
            period = min(period, max(doubled // FRESH_SAMPLES, FRESH_PERIOD))
        return _one_of(period, step)

    @torch.no_grad()
    def part(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Adds the squared norm of some parameters' gradients over this worker's share."""
        norm = self._squared_norm(parameters, gradients)
        self._part = norm if self._part is None else self._part + norm

    def part_sum(self) -> Tensor:
        """The squared norm of the parts given since the last `total`: a 0-d tensor on their device."""
        return torch.zeros(()) if self._part is None else self._part

    @torch.no_grad()
    def first_pass(
        self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], *, times: int = 1
    ) -> None:
        """Keeps some parameters' gradients over the first of several passes, so many times those given."""
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
        """Takes the gradient of the whole step, over `batch` examples.

        `part_batch` examples made up the first pass, or each of `parts` workers' shares (their harmonic mean
        where they differ). `part_sqr` is the sum of `part_sum` over workers; None: this one's own.
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
        """Takes in what was measured a few steps ago: computed by now, and read by all ranks at this step."""
        if self._queue and self._queue[0].step <= step - READ_STEPS:
            self._take(self._queue.pop(0))

    def sample(self) -> NoiseSample | None:
        """The present estimate, or None before the first; never waits for the device."""
        return self._average.sample(self._initial_batch)

    def cautious(self) -> NoiseSample | None:
        """What a batch size may depend on; None while too little is known.

        A squared gradient that is lost in the noise, estimated as 0, would make every batch look worthwhile.
        So it counts as its standard error at least.
        """
        return self._cautious

    def state_dict(self) -> State:
        """Everything; waits for what is still being computed."""
        return {**asdict(self._average), "pending": [measured.numbers() for measured in self._queue]}

    def load_state_dict(self, state: State) -> None:
        """Goes on from a `state_dict`, of whichever rank."""
        self._average = _Average(**{key: value for key, value in state.items() if key != "pending"})
        self._judge()
        self._queue = [
            _Measured(step, source, part_batch, batch, torch.tensor(norms, dtype=torch.float64))
            for step, source, part_batch, batch, *norms in state["pending"]
        ]
        self._part, self._first = None, {}

    def _norms_of(self, first: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor]) -> Tensor:
        """Squared norms of first and whole gradient and of their difference; uses the first one up."""
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
        """Lists of gradients as the optimizer sees them, perhaps bit by bit."""
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
        """Once for all the steps until the next sample."""
        known = self._average.count >= FEWEST_SAMPLES
        self._cautious = self._average.sample(self._initial_batch, cautious=True) if known else None


@dataclass(frozen=True, slots=True)
class _Measured:
    """Squared norms on their way from the device, and what they are of."""

    step: int
    source: Comparison
    part_batch: float
    """Of a share, or of the first pass."""
    batch: int
    norms: Tensor
    """In the host's memory as soon as `done`: (small, big), or (first, whole, their difference)."""
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
    """Weighted means of the samples' |G|^2 and S, whose ratio is what matters.

    In the course of training both change by orders of magnitude, far more than their ratio, and a sample of
    batch B errs in |G|^2 by about S / B. So it counts with weight B^2 / S (S as it typically is at the time),
    and SMOOTHING ** (its age in steps at the initial batch).
    """

    count: float = 0.0
    weight: float = 0.0
    sqr_sum: float = 0.0
    trace_sum: float = 0.0
    square_sum: float = 0.0
    """Of (|G|^2 B / S)^2: samples whose errors are alike."""
    typical: float = 0.0
    """S as it was lately."""
    step: int = 0

    def add(self, measured: _Measured, initial_batch: int) -> None:
        sqr, trace = measured.estimate()
        if not (math.isfinite(sqr) and math.isfinite(trace)) or not any(measured.read()):
            return  # an overflow, or no parameter that counts yet
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
        # Estimates can fall below zero, the truth cannot.
        sqr, trace = self.sqr_sum / self.weight, max(self.trace_sum / self.weight, 0.0)
        least = self._ratio_error() * trace if cautious else 0.0
        return NoiseSample(sqr=max(sqr, least), var=trace / initial_batch)

    def _ratio_error(self) -> float:
        """Standard error of |G|^2 / S.

        With z = |G|^2 B / S of a sample and r the ratio, z - r B has one variance v for all batches; r is
        fitted with weights B^2, whose sum is about `trace_sum`, and so has variance v over that sum.
        """
        if self.trace_sum <= 0:
            return 0.0
        ratio = self.sqr_sum / self.trace_sum
        rest = self.square_sum - ratio * self.sqr_sum
        return math.sqrt(max(rest, 0.0) / self.count / self.trace_sum)


def _one_of(period: int, step: int) -> bool:
    """Whether this is the one step of its period that is taken, which lies elsewhere in the next.

    Passes may be as long as a period, and the same steps of each, its last ones, cannot be compared. Two that
    are taken lie at least half a period apart.
    """
    number, place = divmod(step, period)
    return place == crc32(number.to_bytes(8)) % (period // 2)


def _squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    precision = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=precision)  # noqa: SLF001
    return torch.stack(norms).square().sum()
