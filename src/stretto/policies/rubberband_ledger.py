"""What a study has cost so far, as far as a policy can see: nodes that came and went, GPU time used."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView
from stretto.policies.rubberband_course import Course
from stretto.pricing.billing import Per

HOUR_S = 3600.0


def note_nodes(tuning: Tuning, course: Course, view: ClusterView, given_back: Iterable[str] = ()) -> None:
    """Nodes begin to cost when their start-up begins, and cease when they are gone."""
    here = {node.id: node.instance for node in view.nodes if node.instance}
    gone = set(given_back) | (course.since_s.keys() - here.keys())
    for node in sorted(gone & course.since_s.keys()):
        course.spent_usd += _node_usd(tuning, course, node, view.now_s)
        del course.since_s[node]
        del course.type_of[node]
    for node, instance in here.items():
        if node not in gone and node not in course.since_s:
            course.since_s[node] = view.now_s - tuning.profile.init_s.mean
            course.type_of[node] = instance
            course.spent_usd += tuning.billing.usd_per_new_node


def note_work(tuning: Tuning, course: Course, jobs: Iterable[JobView]) -> None:
    """GPU time since it was last counted, at the price of the stage's nodes."""
    if tuning.billing.per is not Per.FUNCTION:
        return
    instance = tuning.instance(course.plan.instance)
    usd_per_gpu_s = instance.usd_per_hour / instance.gpus / HOUR_S
    for job in jobs:
        fresh_s = job.attained_gpu_s - course.counted_gpu_s.get(job.id, 0.0)
        course.spent_usd += fresh_s * usd_per_gpu_s
        course.counted_gpu_s[job.id] = job.attained_gpu_s


def spent_usd(tuning: Tuning, course: Course, now_s: float) -> float:
    """Everything up to now."""
    return course.spent_usd + sum(_node_usd(tuning, course, node, now_s) for node in course.since_s)


def _node_usd(tuning: Tuning, course: Course, node: str, now_s: float) -> float:
    if tuning.billing.per is not Per.INSTANCE:
        return 0.0
    charged_s = float(tuning.billing.charged_s(np.asarray(now_s - course.since_s[node])))
    return charged_s * tuning.instance(course.type_of[node]).usd_per_hour / HOUR_S
