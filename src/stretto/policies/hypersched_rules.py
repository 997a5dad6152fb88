"""HyperSched's two tests against the deadline: whether to start a trial, whether a resize pays."""

from __future__ import annotations

GAIN = 1.1
"""A larger allocation must bring this many times the progress by the deadline."""


def time_needed_s(eta: int, longest_s: float, startup_s: float, full_training_s: float) -> float:
    """Time a newcomer must have: eta times what the longest-running trial had, or a full training.

    min(eta * (t_longest - t_startup), R * t_epoch on one GPU)
    """
    return min(eta * (longest_s - startup_s), full_training_s)


def resize_gain(speed: float, new_speed: float, left_s: float, startup_s: float) -> float:
    """Progress by the deadline with the new speed, after the restart, over that without a resize.

    s(new) * (T_left - t_startup) / (s(now) * T_left)
    """
    return new_speed / speed * (1.0 - startup_s / left_s)


def on_grid(gpus: int, grid: int) -> bool:
    """Whether a number of GPUs is at most the grid or a multiple of it; every one if there is no grid (0)."""
    return grid == 0 or gpus <= grid or gpus % grid == 0
