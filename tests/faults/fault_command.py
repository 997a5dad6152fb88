"""The command of a disturbed job: goes on from where it was, writes down when it lived, and may be trapped.

python fault_command.py SEED EPOCHS NAP_S

With an odd seed it leaves the work to a process of its own, in another session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SEEN, STATE = "seen.jsonl", "state.json"
RAISE, FLOOD = "raise", "flood"
"""While one of these files is there, the next beat raises, or prints without measure, and removes it."""
CHILD = "FAULT_CHILD"
BEATS = 10
"""Of an epoch."""
FLOOD_LINES = 100_000


def value_after(epoch: int, seed: int) -> float:
    """What it reports after an epoch, another number for each."""
    return 1.0 / (epoch + seed / 1000.0)


def main() -> None:
    seed, epochs, nap_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if seed % 2 and CHILD not in os.environ:
        command = [sys.executable, "-S", *sys.argv]
        sys.exit(
            subprocess.run(
                command, env={**os.environ, CHILD: "1"}, start_new_session=True, check=False
            ).returncode
        )
    folder = Path(os.environ["STRETTO_FOLDER"])
    folder.mkdir(parents=True, exist_ok=True)
    done = json.loads((folder / STATE).read_text()) if (folder / STATE).exists() else 0
    if done:
        report(done, seed)
    for epoch in range(done + 1, epochs + 1):
        for _ in range(BEATS):
            beat(folder, epochs_reported=epoch - 1)
            time.sleep(nap_s / BEATS)
        (folder / f"{STATE}.new").write_text(str(epoch))
        (folder / f"{STATE}.new").rename(folder / STATE)
        report(epoch, seed)


def report(epoch: int, seed: int) -> None:
    sys.stdout.write(json.dumps({"epoch": epoch, "loss": value_after(epoch, seed)}) + "\n")
    sys.stdout.flush()


def beat(folder: Path, *, epochs_reported: int) -> None:
    """Say that this process lives, and step into what was laid.

    The lines of a flood have the metric, which makes no epochs of them once one was reported.
    """
    line = json.dumps({"t_s": time.monotonic(), "pid": os.getpid()}) + "\n"
    file = os.open(folder / SEEN, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)
    if _sprung(folder / RAISE):
        raise RuntimeError("a trap that was laid for this beat")
    if _sprung(folder / FLOOD):
        metric = {"loss": 99.0} if epochs_reported else {}
        for number in range(FLOOD_LINES):
            sys.stdout.write(json.dumps({"step": number, "step_s": 0.01, **metric}) + "\n")


def _sprung(trap: Path) -> bool:
    try:
        trap.unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
