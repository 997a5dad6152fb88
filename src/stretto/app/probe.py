"""A short probe of a training script: how long its steps, epochs, starts and resizes take on this machine."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stretto.app.probe_drive import NODE, PROBE, Probe
from stretto.app.probe_seen import Describe, OnProgress, ProbeSpec, Progress
from stretto.app.profile_file import MeasuredProfile
from stretto.app.real_drive import wall_clock
from stretto.app.real_substrate import Hands, MakeSubstrate, make_substrate
from stretto.app.real_work import Entry, RealWork
from stretto.app.run_folder import RunFolder
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.core.resources import Resources
from stretto.core.substrate import Substrate
from stretto.search.space import Config
from stretto.search.study import Direction, Study
from stretto.substrate.local import LocalSubstrate

__all__ = ["OnProgress", "ProbeSpec", "Progress", "measure", "probe"]

ANY_STUDY = Study(
    name=PROBE, metric="epoch", direction=Direction.MAX, trials=1, rungs=(), eta=2, max_epochs=10**6
)
"""For training that belongs to no study: whatever it reports, its epochs are timed; a command prints them."""


def probe(
    work: RealWork,
    configs: Sequence[Config],
    *,
    slots: int,
    time_s: float,
    study: Study = ANY_STUDY,
    seed: int = 0,
    make: MakeSubstrate = make_substrate,
    on_progress: OnProgress = lambda _: None,
) -> MeasuredProfile:
    """Train some configurations on this machine for a moment.

    The folder it is done in is thrown away, but for the logs of a training that could not be measured.
    """
    spec = ProbeSpec(
        what=str(work),
        configs=tuple(configs),
        tier=Tier.ELASTIC if isinstance(work, Entry) else Tier.RIGID,
    )
    hands = Hands(
        work=lambda _: work,
        study=study,
        slots=slots,
        nodes=(Node(NODE, Resources(gpu=slots)),),
        seed=seed,
        retries=0,
    )
    with _scratch() as place:
        substrate = make(hands, RunFolder(place), wall_clock(time.time()))
        try:
            describe = substrate.described if isinstance(substrate, LocalSubstrate) else lambda _: None
            return measure(
                spec, substrate, slots=slots, time_s=time_s, describe=describe, on_progress=on_progress
            )
        finally:
            substrate.stop_now()


@contextmanager
def _scratch() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="stretto-probe-"))
    try:
        yield place
    except InputError:
        raise
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    shutil.rmtree(place, ignore_errors=True)


def measure(
    spec: ProbeSpec,
    substrate: Substrate,
    *,
    slots: int,
    time_s: float,
    describe: Describe = lambda _: None,
    on_progress: OnProgress = lambda _: None,
) -> MeasuredProfile:
    """Probe on a substrate that has one node "local" of so many slots; all that it starts it stops.

    `time_s` is counted from the first sign of training: loading its code is not measuring. `describe` says
    what the training code of a job turned out to want, once it is known.
    """
    if slots < 1:
        raise InputError(f"{slots} slots hold no worker.", remedy="Give at least one.")
    if not 0.0 < time_s < float("inf"):
        raise InputError(f"a probe of {time_s:g} s measures nothing.", remedy="Give a time such as 90s.")
    probe = Probe(spec, substrate, slots=slots, time_s=time_s, describe=describe, on_progress=on_progress)
    try:
        probe.run()
    finally:
        probe.stop()
    measured = probe.result()
    if not measured.epochs and not measured.speeds:
        raise InputError(
            f"no step or epoch was timed in {time_s:g} s.",
            where=spec.what,
            remedy='Give more time: --time 5m. A command prints {"epoch": 1} and so on when epochs end.',
        )
    return measured
