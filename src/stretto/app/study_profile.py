"""The parts of a study file that say how fast trials are, as believed or as they really are."""

from __future__ import annotations

import reprlib

from stretto.app.study_fields import Fields
from stretto.core.errors import InputError
from stretto.planning.profile import Latency, Spread, SpreadBelief

MOST_VARIATION = 10.0
"""A standard deviation of more means than this is a slip."""


def read_spread(fields: Fields, key: str, default: SpreadBelief) -> SpreadBelief:
    """A mean and a standard deviation, or a number that does not vary."""
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
    """An epoch's time, with how much it varies.

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
                f"{part} stands beside sd, which covers it.",
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
