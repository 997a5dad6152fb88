"""Every figure, one after the other, each in a process of its own: what `make bench` prints."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FIGURES = (
    # shared clusters
    "faithful",
    "regimes",
    "optimal",
    "fast",
    "light",
    "optimus_servers",
    # studies
    "hypersched_published",
    "hypersched_toy",
    "real_curves",
    "planner_quality",
    "planner_grid",
    "planner_speed",
    "calibration",
    # what people and disks do to files
    "fuzz",
    # training for real
    "resize",
    "equivalence",
    "overhead",
    "noise_overhead",
    "prediction",
    "ray_tune",
    "controller_load",
    "many_jobs",
    "faults",
    "stopping",
    # on Ray
    "ray_plan",
    "ray_resize",
    "ray_placement",
    "ray_faults",
    "ray_trials",
    "scale",
)
"""What needs a GPU is in gpu/."""


def main() -> None:
    started_s = time.perf_counter()
    failed = []
    for figure in FIGURES:
        begun_s = time.perf_counter()
        path = Path(__file__).with_name(f"{figure}.py")
        if subprocess.run([sys.executable, str(path)], check=False).returncode:  # noqa: S603 - our own script
            failed.append(figure)
        print(f"  ({figure}: {time.perf_counter() - begun_s:.0f} s)\n", flush=True)
    print(f"All figures in {(time.perf_counter() - started_s) / 60:.1f} minutes")
    if failed:
        sys.exit(f"These ended with an error: {', '.join(failed)}")


if __name__ == "__main__":
    main()
