"""Every figure, one after the other: what `make bench` prints."""

from __future__ import annotations

import time

import faithful
import fast
import light
import optimal
import optimus_servers
import regimes


def main() -> None:
    started = time.perf_counter()
    for figure in (faithful, regimes, optimal, fast, light, optimus_servers):
        begun = time.perf_counter()
        figure.main()
        print(f"  ({time.perf_counter() - begun:.0f} s)\n", flush=True)
    print(f"All figures in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
