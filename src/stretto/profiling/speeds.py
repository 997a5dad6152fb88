"""The speeds of a study: from its file, from an earlier measurement, or from a probe now."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from stretto.core.cluster import Node
from stretto.core.seeds import child_rng
from stretto.driving.request import CheckedStudy
from stretto.driving.target import OpenTarget
from stretto.inputs.profile import MeasuredProfile, read_profile, write_profile
from stretto.inputs.study import belief_of
from stretto.inputs.work import Entry
from stretto.planning.profile import Profile
from stretto.pricing.instances import Offer
from stretto.profiling.launched_node import on_launched_node
from stretto.profiling.origin import known_profile, origin_of
from stretto.profiling.probe import no_epoch, probe, slots_of
from stretto.profiling.probe_data import OnProgress, ProbeTime, probe_time
from stretto.runs.status import holding

MOST_PROBED = 4
"""The most configurations of a probe; several show how much trials differ."""
MORE_TIME = (
    "Stretto waits three quarters of the time until the deadline for a first sign of training and an eighth "
    "for the end of an epoch (5 and 10 minutes without a deadline). Give a later deadline, or write "
    '[profile] epoch_s = 60 and speedup = { "1" = 1.0 } in the study, or measure with `stretto profile '
    '--study FILE --time 30m` and write [profile] file = "profile.json" there.'
)
ONLY_LONE = (
    " Epochs were timed only while the other slots were idle; they may take longer beside others, so the "
    "forecast has a wider interval."
)


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of a study."""

    profile: Profile
    source: str
    """Their source, in words."""


def speeds_of(
    checked: CheckedStudy,
    target: OpenTarget,
    offer: Offer,
    on_progress: OnProgress = lambda _: None,
) -> Speeds:
    """From the study's file; else as measured before, for this or another run; else from a probe now."""
    folder, outline = checked.folder, checked.outline
    if outline.profile is not None:
        return Speeds(outline.profile, f"Speeds: as [profile] of {outline.path} says.")
    known = None if folder.is_begun else known_profile(checked, target)
    if known is None and not folder.is_begun:
        with holding(folder):
            found = _measured(checked, target, on_progress)
            if not found.tells_epochs:
                raise no_epoch(found, MORE_TIME, is_command=not isinstance(checked.work, Entry))
            write_profile(folder.profile, found)
        source = f"Speeds: measured now ({folder.profile})."
    elif known is None or known.folder == folder:
        source = f"Speeds: measured before for this run ({folder.profile})."
    else:
        with holding(folder):
            write_profile(folder.profile, known.taken_over())
        source = (
            f"Speeds: measured before for the run {known.folder.name} ({known.folder.profile}), "
            "with the same study, training code and machine."
        )
    measured = read_profile(folder.profile)
    if measured.only_lone:
        source += ONLY_LONE
    if measured.failure:
        source += f"\n{measured.failure}"
    return Speeds(belief_of(measured, outline, offer), source)


def _measured(checked: CheckedStudy, target: OpenTarget, on_progress: OnProgress) -> MeasuredProfile:
    """Probes, on a node that is launched for it if there is none."""
    origin = origin_of(checked, target)

    def measure(on: OpenTarget, nodes: tuple[Node, ...], start_s: float) -> MeasuredProfile:
        left_s = checked.left_s(time.monotonic())
        within = probe_time(None if left_s is None else left_s - start_s)
        return _probe(checked, on, nodes, within=within, on_progress=on_progress)

    if target.to_measure_on:
        found = measure(target, target.to_measure_on, 0.0)
    else:
        found = on_launched_node(checked, target, measure, on_progress)
    return dataclasses.replace(found, origin=origin)


def _probe(
    checked: CheckedStudy,
    target: OpenTarget,
    nodes: tuple[Node, ...],
    *,
    within: ProbeTime,
    on_progress: OnProgress,
) -> MeasuredProfile:
    """Probes some configurations of the study."""
    space, seed = checked.outline.space, checked.request.seed
    slots = slots_of(nodes)
    count = min(max(slots, 2), MOST_PROBED)
    return probe(
        checked.work,
        [space.sample(child_rng(seed, "probe", str(number))) for number in range(count)],
        slots=slots,
        target=target,
        nodes=nodes,
        time_s=within.usual_s,
        first_epoch_s=within.first_epoch_s,
        loading_s=within.loading_s,
        max_workers=None if checked.elastic else 1,
        study=checked.outline.study,
        seed=seed,
        on_progress=on_progress,
        more_time=MORE_TIME,
        log=checked.folder.failed_log,
    )
