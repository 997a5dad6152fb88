"""What is believed of a study's speed once a probe has measured it."""

from __future__ import annotations

from stretto.app.profile_file import MeasuredProfile, believe
from stretto.app.study_cluster import Offer
from stretto.app.study_file import StudyOutline
from stretto.planning.profile import Profile


def belief_of(measured: MeasuredProfile, outline: StudyOutline, offer: Offer) -> Profile:
    """Trials run where the probe did, unless the nodes of [cluster] are brought up for them."""
    rented = outline.rented
    if rented is None or offer != rented.offer:
        return believe(measured)
    return believe(measured, same_machine=False, queue_s=rented.queue_s, init_s=rented.init_s)
