"""`stretto simulate --replay` of jobs: the real run beside simulations under other policies."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from stretto.cli.flags import nothing_to_replay
from stretto.core.units import format_duration
from stretto.policies.registry import Options
from stretto.report.tables import hours_text, metrics_text
from stretto.runs.folder import RunFolder
from stretto.runs.job_results import RunResult, run_result
from stretto.runs.status import ending_of
from stretto.simulation.replay_jobs import recorded_workload, replay_jobs
from stretto.system.plain_json import json_data


def compare_replay(folder: RunFolder, policies: Sequence[str], options: Options, *, as_json: bool) -> None:
    """Simulate the jobs of the run under every policy, and print the metrics beside the real run."""
    events = list(folder.events())
    workload = recorded_workload(events)
    if not workload.jobs:
        raise nothing_to_replay(folder.path)
    for note in workload.notes:
        print(f"{folder.name}: {note}", file=sys.stderr)
    metrics = [run.metrics for run in replay_jobs(events, policies, options=options)]
    actual = run_result(folder, ending_of(folder))
    if as_json:
        runs = [dataclasses.asdict(one) for one in metrics]
        found = json_data({"actual": actual.as_dict(), "runs": runs})
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print(f"{_real_run(actual)}\n\n{metrics_text(metrics)}")


def _real_run(actual: RunResult) -> str:
    done = [job for job in actual.jobs if job.jct_s is not None]
    mean = "" if actual.mean_jct_s is None else f", mean JCT {format_duration(actual.mean_jct_s)}"
    return (
        f"{actual.policy} (real): {len(done)}/{len(actual.jobs)} jobs done{mean}, "
        f"{format_duration(actual.finished_s)} in all, {hours_text(actual.gpu_hours)} slot hours"
    )
