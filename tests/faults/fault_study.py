"""The command whose study is disturbed: `stretto tune` with workers that are given up and retried sooner.

python fault_study.py FOLDER POLICY SEED      begins or resumes FOLDER/runs/study
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from launching import finished, prepare, start
from stretto.core.errors import StrettoError
from stretto.core.job import Job
from stretto.core.seeds import child_rng
from stretto.driving.drive import RealSubstrate
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.stop import Stop, listening
from stretto.driving.substrate import TrainingSpec
from stretto.runs.deadline import AtDeadline
from stretto.runs.folder import RunFolder
from stretto.runs.mend import mend
from stretto.runs.status import holding
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.substrate import JobFiles
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import find_slots

NAME = "study"
SLOTS = 4
RULES = Rules(grace_s=5.0, park_s=10.0, retries=20, heartbeat_s=3.0, hang_s=60.0)
"""Silence is noticed in seconds, and no number of faults in a row is too many; that bound has tests."""
CHECKPOINT_EVERY_S = 0.4

STUDY = """
[study]
name = "study"
metric = "loss"
direction = "min"
trials = {trials}

[halving]
rungs = "geometric"
min_epochs = 2
eta = 2
max_epochs = {epochs}

[space]
lr = {{ log = [1e-3, 1e-1] }}
nap_s = {{ choice = [{nap_s}] }}

[limits]
deadline = "{deadline}"

[profile]
epoch_s = {epoch_s}
speedup = {{ "1" = 1.0, "2" = 1.9, "4" = 3.6 }}
start_s = 0.3
"""


def lay_out(
    folder: Path, *, trials: int, epochs: int, nap_s: float, epoch_s: float, deadline: str = "1h"
) -> None:
    """The files of a study in a folder."""
    text = STUDY.format(trials=trials, epochs=epochs, nap_s=nap_s, epoch_s=epoch_s, deadline=deadline)
    (folder / "study.toml").write_text(text, encoding="utf-8")
    (folder / "train.py").write_text("from fault_train import train\n", encoding="utf-8")


def job_seed(job_id: str) -> int:
    """Of a trial's training."""
    return int(child_rng(0, "training", job_id).integers(2**31))


def impatient(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
    """Workers as `tune` has them, but given up sooner when they are silent."""

    def spec_of(job: Job) -> TrainingJob:
        return TrainingJob(
            entry=str(training.work(job)),
            config=dict(job.config),
            epochs=job.work.epochs,
            seed=job_seed(job.id),
            metric="loss",
            maximise=False,
            waits_for_ack=True,
        )

    return LocalSubstrate(
        spec_of=spec_of,
        run_dir=folder.path,
        slots=find_slots(SLOTS),
        clock=clock,
        rules=RULES,
        files=JobFiles(checkpoint_every_s=CHECKPOINT_EVERY_S),
    )


def asked(folder: Path, policy: str, seed: int) -> CheckedStudy:
    """What the command is asked for."""
    return check_request(
        TuneRequest(
            study=folder / "study.toml",
            work=f"{folder}/train.py:train",
            policy=policy,
            slots=SLOTS,
            name=NAME,
            runs=folder / "runs",
            seed=seed,
            at_deadline=AtDeadline.STOP,
        )
    )


def main() -> None:
    folder, policy, seed = sys.argv[1:]
    try:
        checked = asked(Path(folder), policy, int(seed))
        if finished(checked) is None:
            mend(checked.folder, yes=True)
            stop = Stop()
            with holding(checked.folder, checked.target.devices), listening(stop):
                start(prepare(checked), make=impatient, stop=stop)
    except (StrettoError, OSError) as error:  # as the command line does
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
