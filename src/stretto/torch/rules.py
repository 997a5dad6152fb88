"""Learning-rate rules (`lr_rule`): how rates follow the batch size, by AdaScale and others.

With r = batch / initial batch and the gain of models.noise, in [1, r], a rate is multiplied by

    adascale    gain
    linear      r
    sqrt        sqrt(r)
    auto        gain for SGD and similar optimizers; sqrt(gain) for Adam and similar ones, whose step length
                does not depend on the gradient's length

Adam divides each element of the gradient by sqrt(v / (1 - beta2^t)) + eps, where v is a running mean of its
squares. The noise of this preconditioned gradient is the one that matters. An element whose gradient was
almost always 0, such as the weight of a pixel that is nearly always blank, has a tiny v, so its next gradient
would outweigh all others. So we use at least LEAST_ROOT times the root mean square of its tensor's sqrt(v).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from stretto.core.observations import NoiseSample

ADAM_WARM_STEPS = 5
"""Parameters with fewer steps are left out, as their second moment is not reliable yet."""
LEAST_ROOT = 0.1
"""Minimum of sqrt(v), relative to its root mean square over a tensor."""
CPU_CHUNK, GPU_CHUNK = 1 << 15, 1 << 24
"""Elements preconditioned at once: they fit in a CPU's cache, or take a small part of a GPU's memory."""


def is_adam_like(optimizer: Optimizer) -> bool:
    """Whether the optimizer divides gradients by a running second moment."""
    return isinstance(optimizer, (Adam, AdamW, NAdam, RAdam))


class AdamPreconditioner:
    """Divides gradients as Adam does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._warm: set[Tensor] = set()

    def divided(
        self, parameters: Sequence[Tensor], *columns: Sequence[Tensor]
    ) -> Iterator[list[list[Tensor]]]:
        """Preconditioned gradients of parameters past their warm-up, as new tensors in bounded chunks."""
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
        # The step count may be on the device, so we stop reading it once it is large enough.
        if parameter not in self._warm and float(state["step"]) >= ADAM_WARM_STEPS:
            self._warm.add(parameter)
        return parameter in self._warm

    def _corrections(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Any]:
        """sqrt(1 - beta2^t) of each parameter; tensors if t is on the device."""
        if not parameters:
            return []
        steps = torch.stack([torch.as_tensor(self._optimizer.state[one]["step"]) for one in parameters])
        corrections = (1 - float(group["betas"][1]) ** steps).sqrt()
        return list(corrections.unbind()) if corrections.is_cuda else corrections.tolist()


def _roots(moments: list[Tensor]) -> list[Tensor]:
    """Square roots of second moments, at least LEAST_ROOT of their tensor's root mean square."""
    roots = torch._foreach_sqrt(moments)  # noqa: SLF001
    norms = torch._foreach_norm(roots, 2)  # noqa: SLF001
    least = [norm * (LEAST_ROOT / root.numel() ** 0.5) for norm, root in zip(norms, roots, strict=True)]
    return [torch.maximum(root, one) for root, one in zip(roots, least, strict=True)]


class _Row(NamedTuple):
    """A piece of a parameter's second moment, and the same piece of its gradients."""

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
    """The factor of learning rates for a step at `scale` times the initial batch.

    Before noise is measured, the rules that depend on it use the factor min(scale, 1).
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
    """The gain: how many steps at the initial batch one step at `scale` times that batch is worth.

    Before noise is measured, it is min(scale, 1).
    """
    if noise is None:
        return min(scale, 1.0)
    left = noise.var / scale + noise.sqr  # as models.noise.gain, but fast: this runs at every step
    return (noise.var + noise.sqr) / left if left > 0 else 1.0
