"""Every figure, one after the other: what `make bench` prints."""

from __future__ import annotations

import time

import calibration
import controller_load
import faithful
import fast
import faults
import hypersched_published
import hypersched_toy
import light
import noise_overhead
import optimal
import optimus_servers
import planner_grid
import planner_quality
import planner_speed
import prediction
import ray_tune
import real_curves
import regimes
import resize

FIGURES = (
    faithful,
    regimes,
    optimal,
    fast,
    light,
    optimus_servers,
    hypersched_published,
    hypersched_toy,
    real_curves,
    planner_quality,
    planner_grid,
    planner_speed,
    calibration,
    resize,
    noise_overhead,
    prediction,
    ray_tune,
    controller_load,
    faults,
)
"""Shared clusters first, then studies, then training for real; what needs a GPU is in gpu/."""


def main() -> None:
    started = time.perf_counter()
    for figure in FIGURES:
        begun = time.perf_counter()
        figure.main()
        print(f"  ({time.perf_counter() - begun:.0f} s)\n", flush=True)
    print(f"All figures in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
