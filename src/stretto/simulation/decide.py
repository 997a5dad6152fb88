"""One decision for the state of a cluster, for any other scheduler that asks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.control.instruct import check
from stretto.core.allocation import NOTHING
from stretto.core.decision import Decision
from stretto.core.seeds import child_rng
from stretto.inputs.arguments import given, given_options, given_text
from stretto.inputs.snapshot import has_batch_limits
from stretto.policies.asking import ask
from stretto.policies.base import ClusterView
from stretto.policies.pollux import fitness
from stretto.policies.registry import make_policy
from stretto.system.threads import one_blas_thread


@dataclass(frozen=True, slots=True)
class Answer:
    """A decision, its objective, and how long it took."""

    view: ClusterView
    decision: Decision
    objective: float | None
    """Pollux' fitness of the decision; p is that of pollux if it decided, else the published -1."""
    decision_ms: float

    def as_dict(self) -> dict[str, Any]:
        """The JSON answer that docs/snapshot.md describes."""
        allocations = self.decision.allocations
        return {
            "allocations": {job.id: dict(allocations.get(job.id, NOTHING).workers) for job in self.view.jobs},
            "batch": {
                job.id: {"atomic": batch.atomic, "accumulation": batch.accumulation}
                for job in self.view.jobs
                if (batch := self.decision.batches.get(job.id)) and has_batch_limits(job.job)
            },
            "reasons": {
                job_id: {"code": reason.code.value, "text": reason.text}
                for job_id, reason in self.decision.reasons.items()
            },
            "objective": self.objective,
            "decision_ms": self.decision_ms,
        }


def decide(view: ClusterView, policy: str, *, options: Mapping[str, str] | None = None) -> Answer:
    """Ask the named policy once."""
    given(view, ClusterView, "view", 'Give read_snapshot("cluster.json").')
    chosen = make_policy(given_text(policy, "policy", "pollux"), options=given_options(options))
    with one_blas_thread():
        started = time.perf_counter()
        decision, _ = ask(chosen, view, None, child_rng(0, "policy", "0"))
        decision_ms = 1e3 * (time.perf_counter() - started)
        check(view, decision)
        objective = decision.objective
        if objective is None:
            objective = fitness(view, decision.allocations)
    return Answer(view, decision, objective, decision_ms)
