"""How a learning rate follows the batch size, and how much a step is worth.

With r = batch / initial batch and the gain of models.noise, in [1, r], a rate is multiplied by

    adascale    gain          as far as the larger batch makes the gradient better
    linear      r
    sqrt        sqrt(r)
    auto        gain for SGD and its like; sqrt(gain) for Adam and its like, whose steps are as long
                whatever the gradient's length, so that only its noise, a square root, is left to follow
"""

from __future__ import annotations

from typing import Literal, get_args

from torch.optim import Optimizer

from stretto.core.observations import NoiseSample
from stretto.torch.adam import is_adam_like

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
