"""What is over and paid for in a study, as far as a policy can see: nodes that are gone, GPU time used."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stretto.core.units import HOUR_S
from stretto.planning.forecast import HeldNode
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView
from stretto.policies.rubberband_course import Course
from stretto.pricing.billing import Per


def note_nodes(tuning: Tuning, course: Course, view: ClusterView, given_back: Iterable[str] = ()) -> None:
    """Nodes begin to cost when their start-up begins, and cease when they are gone."""
    here = {node.id: node.instance for node in view.nodes if node.instance}
    gone = set(given_back) | (course.held.keys() - here.keys())
    for name in sorted(gone & course.held.keys()):
        course.spent_usd += _stay_usd(tuning, course.held.pop(name), view.now_s)
    for name, instance in here.items():
        if name not in gone and name not in course.held:
            course.held[name] = HeldNode(instance, view.now_s - tuning.profile.init_s.mean)
            course.spent_usd += tuning.billing.usd_per_new_node


def note_work(tuning: Tuning, course: Course, jobs: Iterable[JobView]) -> None:
    """GPU time since it was last counted, at the price of the stage's nodes that it was used on."""
    if tuning.billing.per is not Per.FUNCTION:
        return
    for job in jobs:
        fresh_s = job.attained_gpu_s - course.counted_gpu_s.get(job.id, 0.0)
        course.spent_usd += fresh_s * _usd_per_gpu_s(tuning, course, job)
        course.counted_gpu_s[job.id] = job.attained_gpu_s


def _usd_per_gpu_s(tuning: Tuning, course: Course, job: JobView) -> float:
    """Nodes of the stage that were never rented are there anyway, and have their own price."""
    instance = tuning.instance(course.plan.instance)
    rented_usd = instance.usd_per_hour / instance.gpus
    own_usd = next((node.usd_per_hour / node.gpus for node in tuning.own if node.gpus == instance.gpus), 0.0)
    gpus = dict(job.allocation.workers) or course.was.get(job.id, {})
    own = sum(count for node, count in gpus.items() if node in course.kept and node not in course.held)
    share = own / sum(gpus.values()) if gpus else 0.0
    return (rented_usd + share * (own_usd - rented_usd)) / HOUR_S


def _stay_usd(tuning: Tuning, node: HeldNode, until_s: float) -> float:
    if tuning.billing.per is not Per.INSTANCE:
        return 0.0
    charged_s = float(tuning.billing.charged_s(np.asarray(until_s - node.since_s)))
    return charged_s * tuning.instance(node.instance).usd_per_hour / HOUR_S
