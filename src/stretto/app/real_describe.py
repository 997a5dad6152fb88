"""Asking the training code of jobs what it wants, before they are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.app.jobs_file import JobSpec
from stretto.app.real_drive import wall_clock
from stretto.app.real_site import OpenSite
from stretto.app.real_substrate import Hands
from stretto.app.real_work import sample_job
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.events import JobFailed
from stretto.core.instructions import Action, Instruction
from stretto.substrate.elastic import ElasticSubstrate
from stretto.wire.messages import Described

DESCRIBE_S = 300.0
"""Training code that has not come to its first batch by then is not waited for."""
LOOK_S = 0.1

Describe = Callable[[Sequence[JobSpec], OpenSite, Path], dict[str, Described]]
"""What training code says of itself, by job; where the log of one that fails is kept."""


def describe_entries(jobs: Sequence[JobSpec], site: OpenSite, log: Path) -> dict[str, Described]:
    """Start the training code of each job and let it come to its first batch, which tells what it wants."""
    works = {job.name: job.work for job in jobs}
    hands = Hands(
        work=lambda job: works.get(job.id, jobs[0].work),
        slots=sum(node.gpus for node in site.nodes),
        nodes=site.nodes,
        retries=0,
        tried=True,
        describe_only=True,
    )
    with site.scratch("describe", log) as folder:
        substrate = site.make(hands, folder, wall_clock(time.time()))
        assert isinstance(substrate, ElasticSubstrate), "commands cannot be asked"
        try:
            return {
                job.name: _described(substrate, job, number, site.nodes[0])
                for number, job in enumerate(jobs, start=1)
            }
        finally:
            substrate.stop_now()


def _described(substrate: ElasticSubstrate, spec: JobSpec, number: int, node: Node) -> Described:
    job = sample_job(spec.name, spec.config)
    substrate.admit(job)
    one = on_nodes({node.id: 1})
    substrate.apply([Instruction(number, Action.START, job.id, one, BatchChoice(1))])
    end_s = substrate.now_s() + DESCRIBE_S
    while (found := substrate.described(job.id)) is None:
        event = substrate.next_event(substrate.now_s() + LOOK_S)
        if isinstance(event, JobFailed) and event.job_id == job.id and substrate.described(job.id) is None:
            raise InputError("the training code failed.", where=f"job {job.id}", remedy=event.error)
        if substrate.now_s() > end_s:
            raise InputError(
                f"the training code took no batch of its loader within {DESCRIBE_S:g} s.",
                where=f"job {job.id}",
                remedy="Give the loader to run.prepare, and go through it inside run.epochs.",
            )
    return found
