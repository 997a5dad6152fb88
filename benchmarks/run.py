"""Every figure, one after the other: what `make bench` prints."""

from __future__ import annotations

import time

import calibration
import faithful
import fast
import hypersched_published
import hypersched_toy
import light
import optimal
import optimus_servers
import planner_grid
import planner_quality
import planner_speed
import real_curves
import regimes

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
)
"""Shared clusters first, then studies."""


def main() -> None:
    started = time.perf_counter()
    for figure in FIGURES:
        begun = time.perf_counter()
        figure.main()
        print(f"  ({time.perf_counter() - begun:.0f} s)\n", flush=True)
    print(f"All figures in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
