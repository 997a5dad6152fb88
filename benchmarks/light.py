"""Figure 4: what importing and installing the core costs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, verdict

USED = "import resource as r; u = r.getrusage(r.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
IMPORTS = ("import stretto", "from stretto import simulate, decide")


def cpu_s(code: str) -> float:
    """CPU seconds of a fresh interpreter, the least of five."""
    command = [sys.executable, "-c", f"{code}; {USED}"]
    return min(float(subprocess.check_output(command)) for _ in range(5))  # noqa: S603


def install_mb() -> float:
    """Size of the core and its dependencies, installed into an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, str(ROOT)]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6


def main() -> None:
    print("Figure 4: light")
    for code in IMPORTS:
        seconds = cpu_s(code)
        print(f"  {code}: {seconds:.3f} s CPU, the interpreter included: {verdict(seconds < 0.3)} (0.3 s)")
    size = install_mb()
    print(f"  core install: {size:.0f} MB: {verdict(size < 300)} (300 MB)")


if __name__ == "__main__":
    main()
