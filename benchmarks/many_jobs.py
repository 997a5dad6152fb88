"""Figure: with many jobs or trials, each costs no more than with few.

Jobs of `true` on 2 slots: the last tenth takes at most 1.2 times as long as the first, and the journal has at
most 5 KB per job. SIGTERM is obeyed within 5 s, also while a file of 10,000 jobs is read, begun or decided
about. With --full, 10,000 jobs take at most 10 minutes under fifo, and 20 under the default policy.

Tiny trials under asha on 2 slots: the last tenth starts as fast as the first, and `explain` of one trial
takes at most 2 s. With --full, 5,000 trials: the journal is below 60 MB, and the controller below 400 MB.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import verdict

from stretto.core.events import Decided, JobFinished
from stretto.journal.rows import find_damage
from stretto.runs.folder import RunFolder

STRETTO = str(Path(sys.executable).with_name("stretto"))
ANSWER_S = 5.0
MANY = 10_000
STOPS_AFTER_S = (0.5, 1.5, 3.0, 6.0)

STUDY = """
[study]
name = "tiny"
metric = "accuracy"
direction = "max"
trials = {trials}
command = ["sh", "trial.sh", "{{lr}}"]
[halving]
rungs = [1]
eta = 3
max_epochs = 3
[space]
lr = {{ float = [0.0, 1.0] }}
[profile]
epoch_s = 0.02
speedup = {{ "1" = 1.0, "2" = 1.5 }}
start_s = 0.05
[machine]
slots = 2
"""
TRIAL = """
for epoch in 1 2 3; do echo "{\\"epoch\\": $epoch, \\"accuracy\\": $1}"; done
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a run."""

    seconds: float
    finished: int
    slowdown: float
    """Time to start the last tenth of its jobs, relative to the first tenth."""
    journal_mb: float
    controller_mb: float
    """Peak memory of its own process."""


def jobs_file(folder: Path, jobs: int) -> Path:
    path = folder / f"jobs-{jobs}.toml"
    entries = (f'[[job]]\nname = "j{n:05d}"\ncommand = ["true"]\nepochs = 1\n' for n in range(jobs))
    path.write_text("\n".join(entries), encoding="utf-8")
    return path


def started(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - our own command
            [STRETTO, *arguments], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )


def peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) / 1e3 if found else 0.0


def ran(folder: Path, run: str, arguments: Sequence[str]) -> Ran:
    """The run of a command, to its end."""
    begun_s = time.monotonic()
    process, most_mb = started(folder, [*arguments, "--name", run]), 0.0
    while process.poll() is None:
        most_mb = max(most_mb, peak_mb(process.pid))
        time.sleep(0.2)
    seconds = time.monotonic() - begun_s
    there = RunFolder(folder / "runs" / run)
    if find_damage(there.journal) is not None:
        sys.exit(there.damage())
    finished, starts_s = 0, dict[str, float]()
    for event in there.events():
        finished += isinstance(event, JobFinished)
        for told in event.instructions if isinstance(event, Decided) else ():
            starts_s.setdefault(told.job_id, event.t_s)
    moments_s = list(starts_s.values())
    tenth = len(moments_s) // 10
    if process.returncode not in {0, 1} or not tenth:
        sys.exit((folder / "log").read_text(encoding="utf-8")[-2000:])
    slowdown = (moments_s[-1] - moments_s[-1 - tenth]) / max(moments_s[tenth] - moments_s[0], 1e-9)
    return Ran(seconds, finished, slowdown, there.journal.stat().st_size / 1e6, most_mb)


def of_jobs(folder: Path, jobs: int, policy: str, most_s: float) -> bool:
    found = ran(
        folder, policy, ["run", jobs_file(folder, jobs).name, "--slots", "2", "--policy", policy, "--json"]
    )
    each_kb = found.journal_mb * 1e3 / jobs
    good = found.finished == jobs and found.slowdown <= 1.2 and each_kb <= 5.0 and found.seconds <= most_s
    print(
        f"{jobs} jobs under {policy:<7} {found.seconds:6.0f} s, the last tenth takes {found.slowdown:.2f} "
        f"times the first, journal {each_kb:.1f} KB a job, controller {found.controller_mb:.0f} MB   "
        f"{verdict(good)}",
        flush=True,
    )
    return good


def of_trials(folder: Path, trials: int) -> bool:
    (folder / "tiny.toml").write_text(STUDY.format(trials=trials), encoding="utf-8")
    (folder / "trial.sh").write_text(TRIAL, encoding="utf-8")
    found = ran(folder, "tiny", ["tune", "tiny.toml", "--policy", "asha"])
    begun_s = time.monotonic()
    subprocess.run(  # noqa: S603 - our own command
        [STRETTO, "explain", "tiny", "trial-007"], cwd=folder, check=True, capture_output=True
    )
    explain_s = time.monotonic() - begun_s
    small = found.journal_mb <= 60.0 * trials / 5000 + 1.0 and found.controller_mb <= 400.0
    good = found.slowdown <= 1.2 and small and explain_s <= 2.0
    print(
        f"{trials} trials under asha  {found.seconds:6.0f} s, {found.finished} finished, the last tenth "
        f"takes {found.slowdown:.2f} times the first, journal {found.journal_mb:.1f} MB, "
        f"controller {found.controller_mb:.0f} MB, explain {explain_s:.1f} s   {verdict(good)}",
        flush=True,
    )
    return good


def of_stops(folder: Path) -> bool:
    """How long a controller of many jobs takes to end after SIGTERM at several moments."""
    name, answers_s = jobs_file(folder, MANY).name, []
    for number, after_s in enumerate(STOPS_AFTER_S):
        process = started(folder, ["run", name, "--slots", "2", "--name", f"stop-{number}"])
        time.sleep(after_s)
        asked_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait()
        answers_s.append(time.monotonic() - asked_s)
    good = max(answers_s) <= ANSWER_S
    told = ", ".join(f"{answer_s:.1f}" for answer_s in answers_s)
    moments = ", ".join(f"{after_s:g}" for after_s in STOPS_AFTER_S)
    print(
        f"SIGTERM {moments} s after the start of {MANY} jobs: over in {told} s   {verdict(good)}", flush=True
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="10,000 jobs under each policy, 5,000 trials")
    parser.add_argument("--only", choices=("jobs", "trials", "stops"))
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--trials", type=int, default=500)
    given = parser.parse_args()
    jobs, trials = (MANY, 5000) if given.full else (given.jobs, given.trials)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="stretto-many-") as place:
        folder = Path(place)
        if given.only in {None, "stops"}:
            of_stops(folder)
        if given.only in {None, "jobs"}:
            of_jobs(folder, jobs, "fifo", 600.0 * jobs / MANY + 10.0)
            of_jobs(folder, jobs, "pollux", 1200.0 * jobs / MANY + 10.0)
        if given.only in {None, "trials"}:
            of_trials(folder, trials)


if __name__ == "__main__":
    main()
