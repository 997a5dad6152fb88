"""How a learning rate follows the batch size (AdaScale and others), and the gradient that Adam steps with.

They divide it element by element by sqrt(v / (1 - beta2^t)) + eps, v being a running mean of its squares, so
that is the gradient whose noise matters. An element that hardly ever had a gradient, such as the weight of a
pixel that is nearly always blank, has a v of nearly nothing: the first gradient it gets would outweigh all
others. So sqrt(v) counts as LEAST_ROOT of its tensor's at least.

With r = batch / initial batch and the gain of models.noise, in [1, r], a rate is multiplied by

    adascale    gain          as far as the larger batch makes the gradient better
    linear      r
    sqrt        sqrt(r)
    auto        gain for SGD and its like; sqrt(gain) for Adam and its like, whose steps are as long
                whatever the gradient's length, so that only its noise, a square root, is left to follow
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from stretto.core.observations import NoiseSample

ADAM_WARM_STEPS = 5
"""Before it, the second moment says too little about a parameter: it is left out."""
LEAST_ROOT = 0.1
"""Of the root mean square of sqrt(v) over the elements of a tensor."""
CPU_CHUNK, GPU_CHUNK = 1 << 15, 1 << 24
"""Elements divided by the preconditioner at once: what a cache holds, or a small share of a card."""


def is_adam_like(optimizer: Optimizer) -> bool:
    """Whether steps are divided by a running second moment, element by element."""
    return isinstance(optimizer, (Adam, AdamW, NAdam, RAdam))


class AdamPreconditioner:
    """What Adam divides each element of a gradient by."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._warm: set[Tensor] = set()

    def divided(
        self, parameters: Sequence[Tensor], *columns: Sequence[Tensor]
    ) -> Iterator[list[list[Tensor]]]:
        """Gradients of warm parameters, divided: new tensors, a bounded number of elements at a time."""
        place = {one: index for index, one in enumerate(parameters)}
        for group in self._optimizer.param_groups:
            warm = [one for one in group["params"] if one in place and self._is_warm(one)]
            rows: list[_Row] = []
            for one, correction in zip(warm, self._corrections(warm, group), strict=True):
                moment = self._optimizer.state[one][
                    "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
                ]
                rows += _pieces(correction, moment, *(column[place[one]] for column in columns))
            for chunk in _chunked(rows):
                divisors = _roots([row.moment for row in chunk])
                torch._foreach_div_(divisors, [row.correction for row in chunk])
                torch._foreach_add_(divisors, float(group["eps"]))
                yield [
                    list(torch._foreach_div(list(gradients), divisors))  # noqa: SLF001
                    for gradients in zip(*(row.gradients for row in chunk), strict=True)
                ]

    def _is_warm(self, parameter: Tensor) -> bool:
        state = self._optimizer.state.get(parameter)
        if not state or "exp_avg_sq" not in state:
            return False
        # The count may live on the device: it is read until it suffices, and then no more.
        if parameter not in self._warm and float(state["step"]) >= ADAM_WARM_STEPS:
            self._warm.add(parameter)
        return parameter in self._warm

    def _corrections(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Any]:
        """sqrt(1 - beta2^t) of each parameter: numbers, or tensors if t is on the device."""
        if not parameters:
            return []
        steps = torch.stack([torch.as_tensor(self._optimizer.state[one]["step"]) for one in parameters])
        corrections = (1 - float(group["betas"][1]) ** steps).sqrt()
        return list(corrections.unbind()) if corrections.is_cuda else corrections.tolist()


def _roots(moments: list[Tensor]) -> list[Tensor]:
    """Square roots of second moments, none far below the others of its tensor."""
    roots = torch._foreach_sqrt(moments)  # noqa: SLF001
    norms = torch._foreach_norm(roots, 2)  # noqa: SLF001
    least = [norm * (LEAST_ROOT / root.numel() ** 0.5) for norm, root in zip(norms, roots, strict=True)]
    return [torch.maximum(root, one) for root, one in zip(roots, least, strict=True)]


class _Row(NamedTuple):
    """A piece of a parameter: its second moment, and the same piece of its gradients."""

    correction: Any
    moment: Tensor
    gradients: tuple[Tensor, ...]


def _pieces(correction: Any, moment: Tensor, *gradients: Tensor) -> list[_Row]:
    limit = GPU_CHUNK if moment.is_cuda else CPU_CHUNK
    if moment.numel() <= limit:
        return [_Row(correction, moment, gradients)]
    split = [tensor.reshape(-1).split(limit) for tensor in (moment, *gradients)]
    return [_Row(correction, first, tuple(others)) for first, *others in zip(*split, strict=True)]


def _chunked(rows: list[_Row]) -> Iterator[list[_Row]]:
    chunk: list[_Row] = []
    elements = 0
    for row in rows:
        limit = GPU_CHUNK if row.moment.is_cuda else CPU_CHUNK
        if chunk and elements + row.moment.numel() > limit:
            yield chunk
            chunk, elements = [], 0
        chunk.append(row)
        elements += row.moment.numel()
    if chunk:
        yield chunk


Rule = Literal["auto", "adascale", "sqrt", "linear"]
RULES: tuple[Rule, ...] = get_args(Rule)


def lr_factor(rule: Rule, optimizer: Optimizer, noise: NoiseSample | None, scale: float) -> float:
    """What learning rates are multiplied by for a step at `scale` times the initial batch.

    Before any noise was measured, the rules that follow it leave the rate as it is, but a smaller batch
    has its share.
    """
    match rule:
        case "linear":
            return scale
        case "sqrt":
            return float(scale**0.5)
        case "adascale":
            return progress_of_step(noise, scale)
        case "auto":
            worth = progress_of_step(noise, scale)
            return float(worth**0.5) if is_adam_like(optimizer) else worth


def progress_of_step(noise: NoiseSample | None, scale: float) -> float:
    """Steps at the initial batch that one step at `scale` times it is worth: the gain.

    Before any noise was measured, a step counts as one, but a smaller batch as its share of one.
    """
    if noise is None:
        return min(scale, 1.0)
    left = noise.var / scale + noise.sqr  # models.noise.gain for plain numbers: this runs at every step
    return (noise.var + noise.sqr) / left if left > 0 else 1.0
