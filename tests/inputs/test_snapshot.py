"""Snapshots: what is read, and what is refused with place, rule and remedy."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inputs import SNAPSHOT
from stretto.core.errors import InputError
from stretto.inputs.snapshot import SnapshotFile, read_snapshot, view_of
from stretto.simulation.decide import decide
from stretto.system.plain_json import json_data


def write(tmp_path: Path, snapshot: Any) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(snapshot if isinstance(snapshot, str) else json.dumps(snapshot))
    return path


def changed(**fields: Any) -> dict[str, Any]:
    """The example with fields of its first job replaced."""
    snapshot = copy.deepcopy(SNAPSHOT)
    snapshot["jobs"][0].update(fields)
    return snapshot


def test_reads_both_ways_to_say_what_a_job_holds(tmp_path: Path) -> None:
    listed = read_snapshot(write(tmp_path, changed(base=["a", "b", "a"])))
    counted = read_snapshot(write(tmp_path, changed(base={"a": 2, "b": 1})))
    assert listed.jobs[0].allocation == counted.jobs[0].allocation
    assert listed.jobs[0].allocation.shape == (2, 1)


def test_node_ids_may_be_numbers_in_base(tmp_path: Path) -> None:
    snapshot = changed(base=[0, 0])
    snapshot["nodes"] = {"0": 4}
    assert read_snapshot(write(tmp_path, snapshot)).jobs[0].allocation.workers == (("0", 2),)


def test_order_is_by_submission(tmp_path: Path) -> None:
    view = read_snapshot(write(tmp_path, changed(creation_timestamp=100.0, age=0)))
    assert [job.id for job in view.jobs] == ["two", "one"]


def test_not_preemptible_jobs_stay(tmp_path: Path) -> None:
    answer = decide(read_snapshot(write(tmp_path, changed(preemptible=False))), "pollux")
    assert dict(answer.decision.allocations["one"].workers) == {"a": 2}


def test_a_minimum_is_met_or_the_job_waits(tmp_path: Path) -> None:
    answer = decide(
        read_snapshot(write(tmp_path, changed(base=[], min_replicas=9, max_replicas=9))), "pollux"
    )
    assert "one" not in answer.decision.allocations
    assert answer.decision.reasons["one"].code == "waits"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base": ["c"]}, "node 'c'"),
        ({"base": ["a"] * 5}, "1 GPUs above"),
        ({"perf_params": [1.0] * 6}, "perf_params"),
        ({"perf_params": [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 11.0]}, "overlap between 1 and 10"),
        ({"perf_params": [0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 1.0]}, "positive times"),
        ({"grad_params": [-1.0, 1.0]}, "gradient statistics"),
        ({"init_batch_size": None}, "init_batch_size"),
        ({"max_batch_size": 64}, "run backwards"),
        ({"atomic_bsz_range": [256, 32]}, "run backwards"),
        ({"min_replicas": 9}, "below min_replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"age": -1}, "age"),
        ({"age": 1e16}, "age"),
        ({"attained_service": 1e300}, "attained_service"),
        ({"creation_timestamp": -1e300}, "creation_timestamp"),
        ({"work_total": 1e300}, "work_total"),
        ({"work_total": 5e-324}, "work_total 4.94066e-324 is next to nothing"),
        ({"perf_params": [1e-300, 0.1, 0.1, 0.1, 0.1, 0.1, 1.0]}, "from 1e-12 to 1e+09 s"),
        ({"perf_params": [1e300, 0.1, 0.1, 0.1, 0.1, 0.1, 1.0]}, "from 1e-12 to 1e+09 s"),
        ({"grad_params": [1e308, 1e308]}, "nor above 1e+100"),
        ({"batch_size": 8192}, "batch_size 8192, max 4096"),
        ({"num_replicas": 9}, "num_replicas 9 is not within min_replicas 0 and max_replicas 8"),
        ({"min_replicas": 3, "num_replicas": 2}, "num_replicas 2 is not within"),
        (
            {"base": ["a"], "atomic_bsz_range": [4000, 4096], "min_replicas": 2},
            "min_replicas has it on 2 GPUs",
        ),
        ({"base": ["a"] * 3, "atomic_bsz_range": [2000, 4096]}, "base has it on 3 GPUs"),
        ({"key": "two"}, "same key twice"),
        ({"colour": "red"}, "colour"),
        ({"tier": "soft"}, "tier"),
    ],
)
def test_wrong_jobs_are_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        read_snapshot(write(tmp_path, changed(**fields)))
    assert said in str(refused.value)
    assert "cluster.json" in refused.value.where


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"nodes": {"a": NaN}, "jobs": []}', '{"nodes": {}}']
)
def test_wrong_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as refused:
        read_snapshot(write(tmp_path, text))
    assert refused.value.remedy


def test_the_line_of_a_syntax_error_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read_snapshot(write(tmp_path, '{"nodes": {"a": 4},\n "jobs": [,]}'))
    assert refused.value.where.endswith("cluster.json:2")


def test_an_empty_cluster_and_no_jobs_are_fine(tmp_path: Path) -> None:
    empty = decide(read_snapshot(write(tmp_path, {"nodes": {}, "jobs": []})), "pollux")
    assert empty.as_dict()["allocations"] == {}
    nowhere = decide(read_snapshot(write(tmp_path, {"nodes": {}, "jobs": [{"key": "x"}]})), "pollux")
    assert nowhere.as_dict()["allocations"] == {"x": {}}


@pytest.mark.parametrize("cpu", [1e-300, 1e300])
def test_resources_nobody_has_are_refused(tmp_path: Path, cpu: float) -> None:
    with pytest.raises(InputError, match="cpu"):
        read_snapshot(write(tmp_path, {"nodes": {"a": {"gpu": 4, "cpu": cpu}}, "jobs": []}))


FRAGMENTED: dict[str, Any] = {
    "nodes": {"a": 7, "b": 7, "c": 2, "d": 2, "e": 7},
    "jobs": [
        {"key": "young", "age": 5000},
        {"key": "old", "age": 800000},
        {"key": "spread", "base": ["e", "b", "b", "a", "e"]},
        {"key": "large", "max_replicas": 13, "age": 800000},
        {
            "key": "pair",
            "min_replicas": 2,
            "max_replicas": 3,
            "age": 80000,
            "perf_params": [0.005, 0.001, 0.001, 0.0001, 0.4, 0.003, 1.0],
            "init_batch_size": 8,
        },
        {"key": "three", "base": ["a", "a", "e"], "age": 800000},
        {"key": "two", "base": ["b", "a"], "min_replicas": 2, "max_replicas": 2},
    ],
}
"""Where a job that had just lost its GPUs to another was asked to give some once more."""


@pytest.mark.parametrize("p", ["1", "0", "-1", "-inf"])
def test_sizes_are_those_that_jobs_take(tmp_path: Path, p: str) -> None:
    answer = decide(read_snapshot(write(tmp_path, FRAGMENTED)), "pollux", options={"p": p})
    assert limits_broken(FRAGMENTED, answer.as_dict()) == []


JOB_POLICIES = ("pollux", "optimus", "tiresias", "drf", "tetris", "srtf", "fifo")
amounts = st.sampled_from([0.0, 1e-6, 64.0, 1e12])
seconds = st.sampled_from([0.0, 5e-324, 1e-6, 600.0, 1e6, 1e15])
units = st.sampled_from([0.0, 1e-6, 1.0, 1e6, 1e18])
pass_times = st.sampled_from([1e-12, 1e-8, 0.001, 0.1, 1.0, 1e9])
norms = st.sampled_from([0.0, 5e-324, 1e-300, 0.01, 1.0, 1e100])


@st.composite
def snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Numbers as far as they go; jobs may hold more or less than they take."""
    sizes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4))
    nodes: dict[str, Any] = {f"n{number}": gpus for number, gpus in enumerate(sizes)}
    free = [node for node, gpus in nodes.items() for _ in range(gpus)]
    if draw(st.booleans()):
        nodes["n0"] = {"gpu": sizes[0], "cpu": draw(amounts), "memory_gib": draw(amounts)}
    jobs = []
    for number in range(draw(st.integers(1, 6))):
        least = draw(st.integers(0, 3))
        job: dict[str, Any] = {"key": f"j{number}", "min_replicas": least}
        held = draw(st.integers(0, min(4, len(free))))
        job["base"], free = free[:held], free[held:]
        job |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "age": seconds,
                    "num_restarts": st.sampled_from([0, 3, 10**9]),
                    "attained_service": seconds,
                    "work_total": units,
                    "work_done": units,
                    "preemptible": st.booleans(),
                    "tier": st.sampled_from(["rigid", "elastic", "adaptive"]),
                    "max_replicas": st.sampled_from([max(least, 1), max(least, 1) + 2, 10**9]),
                },
            )
        )
        if draw(st.booleans()):
            job["init_batch_size"] = draw(st.sampled_from([8, 128]))
            job["max_batch_size"] = draw(st.sampled_from([128, 4096, 10**9]))
            job["atomic_bsz_range"] = draw(st.sampled_from([[1, 1], [1, 10**9], [32, 256]]))
            job["accumulation"] = draw(st.booleans())
            job["perf_params"] = [
                *draw(st.lists(pass_times, min_size=6, max_size=6)),
                draw(st.floats(1.0, 10.0)),
            ]
            job["grad_params"] = draw(st.lists(norms, min_size=2, max_size=2))
        jobs.append(job)
    return {"nodes": nodes, "jobs": jobs, "time": draw(seconds)}


def limits_broken(snapshot: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """Every limit of a snapshot that an answer to it breaks."""
    broken = []
    used: Counter[str] = Counter()
    for job in snapshot["jobs"]:
        held, new = dict(Counter(job.get("base", []))), answer["allocations"][job["key"]]
        used.update(new)
        workers, least = sum(new.values()), max(job.get("min_replicas", 0), 1)
        most = job.get("max_replicas") or max(least, sum(held.values()))
        if any(count < 1 for count in new.values()):
            broken.append(f"{job['key']} has {new}")
        if held and not job.get("preemptible", True) and new != held:
            broken.append(f"{job['key']} was changed")
        if new and new != held and not least <= workers <= most:
            broken.append(f"{job['key']} has {workers}, and takes {least} to {most}")
        batch = answer["batch"].get(job["key"])
        largest = job.get("max_batch_size", job.get("init_batch_size", 0))
        if batch and not 0 < workers * batch["atomic"] * (batch["accumulation"] + 1) <= largest:
            broken.append(f"{job['key']} has a batch of {batch}")
    for node, size in snapshot["nodes"].items():
        if used[node] > (size if isinstance(size, int) else size["gpu"]):
            broken.append(f"{node} is over-allocated")
    objective = answer["objective"]
    return broken if objective is None or math.isfinite(objective) else [*broken, "no objective"]


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(snapshots(), st.sampled_from(["1", "0", "1e-300", "-1", "-10", "-inf"]))
def test_whatever_is_accepted_is_decided_within_its_limits_and_without_a_warning(
    snapshot: dict[str, Any], p: str
) -> None:
    """Warnings are errors in these tests."""
    try:
        view = view_of(msgspec.convert(snapshot, SnapshotFile))
    except (InputError, msgspec.ValidationError):
        return
    for policy in JOB_POLICIES:
        answer = decide(view, policy, options={"p": p} if policy == "pollux" else None)
        assert limits_broken(snapshot, answer.as_dict()) == [], policy


@pytest.mark.parametrize("policy", JOB_POLICIES)
def test_what_a_job_holds_beyond_its_limits_it_keeps_or_gets_within_them(tmp_path: Path, policy: str) -> None:
    snapshot = {
        "nodes": {"a": 4, "b": 4},
        "jobs": [
            {"key": "too-many", "base": ["a", "a", "a"], "max_replicas": 2},
            {"key": "too-few", "base": ["b"], "min_replicas": 2, "max_replicas": 4},
            {"key": "new"},
        ],
    }
    answer = decide(read_snapshot(write(tmp_path, snapshot)), policy)
    assert limits_broken(snapshot, answer.as_dict()) == []


def test_answers_for_machines_have_no_number_that_json_has_not() -> None:
    found = json_data({"a": [math.nan, 1.5], "b": {"c": math.inf}, "d": (1, None)})
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "a": [None, 1.5],
        "b": {"c": None},
        "d": [1, None],
    }
