"""Snapshots: what is read, and what is refused with place, rule and remedy."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from inputs import SNAPSHOT
from stretto.app.decide import decide
from stretto.app.snapshot import read_snapshot
from stretto.core.errors import InputError


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
