"""Workload files and cluster logs: good ones are read as written, bad ones are refused with the place."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.worlds.applications import builtin_catalogue
from stretto.worlds.csv_table import read_table
from stretto.worlds.truth import Workload
from stretto.worlds.workload_files import LogFilter, load_workload, read_workload, workload_of_log

HEADER = "name,time,application,num_replicas,batch_size\n"
GOOD = HEADER + "a,60,cifar10,8,2048\nb,0.5,ncf,1,32768\nc,60,bert,6,384\n"
LOG_HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"


def read(tmp_path: Path, content: str | bytes, name: str = "jobs.csv") -> Workload:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_workload(path, builtin_catalogue())


def test_jobs_are_read_in_order_of_submission(tmp_path: Path) -> None:
    workload = read(tmp_path, GOOD)
    assert workload.name == "jobs"
    assert [(job.id, job.submit_s) for job in workload.jobs] == [("b", 0.5), ("a", 60.0), ("c", 60.0)]
    assert set(workload.truths) == {"a", "b", "c"}
    assert workload.notes == ()


def test_what_a_job_is_made_of(tmp_path: Path) -> None:
    b, a, _ = read(tmp_path, GOOD).jobs
    assert (a.tier, a.worker.requested, a.worker.min, a.worker.max) == (Tier.ADAPTIVE, 8, 1, 64)
    assert (a.batch.initial, a.batch.requested, a.batch.max) == (128, 2048, 4096)
    assert (a.batch.per_gpu_min, a.batch.per_gpu_max) == (32, 1024)
    assert a.work.epochs == 100
    assert a.work.total_units == pytest.approx(39063, rel=1e-4)
    assert (b.tier, b.worker.requested, b.worker.max) == (Tier.RIGID, 1, 1)


def test_a_rigid_job_may_ask_for_more_than_a_scheduler_may_give(tmp_path: Path) -> None:
    (job,) = read(tmp_path, HEADER + "a,0,ncf,4,1024\n").jobs
    assert (job.worker.requested, job.worker.max) == (4, 4)


@pytest.mark.parametrize(
    "content",
    [
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD + "\n\n",
        GOOD.replace(",", " , "),
        GOOD.replace("cifar10", '"cifar10"'),
        gzip.compress(GOOD.encode(), mtime=0),
    ],
    ids=["crlf", "byte-order mark", "blank lines", "spaces", "quotes", "gzip"],
)
def test_harmless_variations_are_read_alike(tmp_path: Path, content: str | bytes) -> None:
    assert read(tmp_path, content).jobs == read(tmp_path, GOOD).jobs


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    turned = "batch_size,name,time,application,num_replicas\n2048,a,60,cifar10,8\n"
    assert read(tmp_path, turned).jobs[0] == read(tmp_path, GOOD).jobs[1]


@pytest.mark.parametrize(
    ("content", "where", "problem"),
    [
        ("", ":1", "empty"),
        ("\n\n", ":1", "empty"),
        (HEADER, ":1", "no rows"),
        ("name,time,application,num_replicas\na,0,bert,6\n", ":1", "no column batch_size"),
        (HEADER.replace("\n", ",colour\n") + "a,0,bert,6,384,red\n", ":1", "unknown column colour"),
        ("name,name,time,application,num_replicas,batch_size\na,a,0,bert,6,384\n", ":1", "name appears more"),
        (HEADER + "a,0,bert,6,384\nb,0,brt,6,384\n", ":3", "unknown application 'brt'"),
        (HEADER + "a,-1,bert,6,384\n", ":2", "time '-1' is below 0"),
        (HEADER + "a,nan,bert,6,384\n", ":2", "time 'nan' is not a finite number"),
        (HEADER + "a,1e999,bert,6,384\n", ":2", "time '1e999' is not a finite number"),
        (HEADER + "a,soon,bert,6,384\n", ":2", "time 'soon' is not a finite number"),
        (HEADER + "a,,bert,6,384\n", ":2", "time '' is not a finite number"),
        (HEADER + "a,1_0,bert,6,384\n", ":2", "time '1_0' is not a finite number"),
        (HEADER + "a,0,bert,0,384\n", ":2", "num_replicas '0' is below 1"),
        (HEADER + "a,0,bert,-6,384\n", ":2", "num_replicas '-6' is below 1"),
        (HEADER + "a,0,bert,1.5,384\n", ":2", "num_replicas '1.5' is not a whole number"),
        (HEADER + "a,0,bert,65,384\n", ":2", "65 replicas of bert; it can use 1 to 64"),
        (HEADER + "a,0,bert,6,8\n", ":2", "batch size 8 of bert is outside the known 12..384"),
        (HEADER + "a,0,bert,6,385\n", ":2", "batch size 385 of bert is outside"),
        (HEADER + "a,0,bert,48,96\n", ":2", "leaves less than 4 examples for each"),
        (HEADER + "a,0,bert,6,384\na,9,bert,6,384\n", ":3", "name 'a' is already that of the job in line 2"),
        (HEADER + ",0,bert,6,384\n", ":2", "name '' is not a readable"),
        (HEADER + "a,0,bert,6\n", ":2", "4 cells where the header has 5"),
        (HEADER + "a,0,bert,6,384,7\n", ":2", "6 cells where the header has 5"),
        (HEADER + ",,,,\n", ":2", "name '' is not a readable"),
        (HEADER + 'a,0,"bert,6,384\n', ":2", "is not CSV"),
        (GOOD.encode("utf-16"), ":1", "byte 0xff is not UTF-8"),
        (HEADER.encode() + b"\xe9t\xe9,0,bert,6,384\n", ":2", "byte 0xe9 is not UTF-8"),
        (b"\x00\x01\x02\x03", ":1", "no rows"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-12], "", "damaged gzip"),
    ],
)
def test_bad_files_are_refused_with_the_place(
    tmp_path: Path, content: str | bytes, where: str, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert caught.value.where == f"{tmp_path / 'jobs.csv'}{where}"
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_a_near_miss_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Did you mean cifar10\?"):
        read(tmp_path, HEADER + "a,0,cifar,8,2048\n")


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, Path("a\0b")):
        with pytest.raises(InputError, match="cannot be read"):
            read_workload(path, builtin_catalogue())


cell = st.sampled_from(
    ["a", "b", "0", "-1", "1e3", "nan", "bert", "ncf", "6", "384", '"', "", "\u0661", "1.5"]
)
garbage = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=100).map(gzip.compress),
    st.binary(max_size=60).map(lambda tail: HEADER.encode() + tail),
    st.binary(max_size=60).map(lambda tail: LOG_HEADER.encode() + tail),
    st.lists(st.lists(cell, min_size=4, max_size=6).map(",".join), max_size=4).map(
        lambda rows: (HEADER + "\n".join(rows)).encode()
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(garbage)
def test_garbage_is_refused_and_nothing_else_happens(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "garbage.csv"
    path.write_bytes(data)
    try:
        workload = load_workload(path, builtin_catalogue(), np.random.default_rng(0))
    except InputError as error:
        assert str(path) in error.where  # noqa: PT017  (a file that happens to be good is fine too)
    else:
        assert workload.jobs


def log_row(second: int, duration_s: float, gpus: int = 1) -> str:
    return f"2017-10-09 07:{second // 60:02d}:{second % 60:02d},{duration_s},{gpus},{duration_s * gpus},vc\n"


LOG = LOG_HEADER + "".join(
    [
        log_row(90, 20 * 3600),
        log_row(30, 100),
        log_row(10, 59),
        log_row(40, 3600),
        log_row(50, 300 * 3600, 2),
        log_row(60, 500 * 3600, 2),
    ]
)


def read_log(tmp_path: Path, log: str = LOG, seed: int = 0, **options: Any) -> Workload:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(log.encode()))
    rng = np.random.default_rng(seed)
    return workload_of_log(read_table(path), builtin_catalogue(), rng, keep=LogFilter(**options))


def test_log_rows_become_jobs_of_their_class(tmp_path: Path) -> None:
    workload = read_log(tmp_path)
    assert workload.name == "log"
    assert [job.submit_s for job in workload.jobs] == [0.0, 10.0, 20.0, 60.0]
    kinds = [job.application for job in workload.jobs]
    assert kinds[0] in {"cifar10", "ncf"}
    assert kinds[1] in {"deepspeech2", "bert"}
    assert kinds[2:] == ["imagenet", "yolov3"]
    tuned = {job.id: builtin_catalogue().get(job.application).tuned for job in workload.jobs}
    assert all((job.worker.requested, job.batch.requested) in tuned[job.id] for job in workload.jobs)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    notes = " ".join(read_log(tmp_path, start_s=5.0, hours=0.02, max_jobs=2).notes)
    assert "2 of 6 rows left out: outside the time window." in notes
    assert "1 of 6 rows left out: of 1000 GPU-hours or more." in notes
    assert "1 of 6 rows left out: not among the 2 drawn." in notes
    assert "shorter" not in notes
    assert "1 of 6 rows left out: shorter than 60 s." in read_log(tmp_path).notes
    assert len(read_log(tmp_path, min_duration_s=0, max_gpu_hours=1e6).jobs) == 6


def test_the_seed_decides_what_a_log_does_not_say(tmp_path: Path) -> None:
    log = LOG_HEADER + "".join(log_row(second, 100) for second in range(200))
    assert read_log(tmp_path, log, seed=1) == read_log(tmp_path, log, seed=1)
    assert read_log(tmp_path, log, seed=1).jobs != read_log(tmp_path, log, seed=2).jobs
    counts = Counter(job.application for job in read_log(tmp_path, log, seed=1).jobs)
    assert set(counts) == {"cifar10", "ncf"}
    assert min(counts.values()) > 60


@pytest.mark.parametrize(
    "options", [{"start_s": -1}, {"hours": 0}, {"hours": float("nan")}, {"max_jobs": 0}, {"max_gpu_hours": 0}]
)
def test_bad_log_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))} is"):
        read_log(tmp_path, **options)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("yesterday,100,1,100,vc", "timestamp 'yesterday' is not a date"),
        ("2017-10-09 07:00:00,x,1,100,vc", "duration 'x' is not a finite number"),
        ("2017-10-09 07:00:00,100,0,100,vc", "num_gpus '0' is below 1"),
        ("2017-10-09 07:00:00,100,1,-5,vc", "gpu_time '-5' is below 0"),
        ("2017-10-09 07:00:00,100,1", "3 cells where the header has 5"),
    ],
)
def test_bad_log_rows_are_refused(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_log(tmp_path, LOG_HEADER + row + "\n")


def test_a_log_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no job is left\. 6 of 6 rows .* spans 0\.0 hours from 2017-10-09"):
        read_log(tmp_path, start_s=9999)


def test_the_header_tells_the_kind_of_file(tmp_path: Path) -> None:
    def load(content: str, keep: LogFilter | None = None) -> Workload:
        (tmp_path / "any.csv").write_text(content)
        return load_workload(tmp_path / "any.csv", builtin_catalogue(), np.random.default_rng(0), keep=keep)

    assert [job.id for job in load(GOOD).jobs] == ["b", "a", "c"]
    assert len(load(LOG).jobs) == 4
    assert len(load(LOG, LogFilter(max_jobs=3)).jobs) == 3
    with pytest.raises(InputError, match="from a cluster log only"):
        load(GOOD, LogFilter(max_jobs=3))
    with pytest.raises(InputError, match="neither that of a workload nor"):
        load("x,y\n1,2\n")
    with pytest.raises(InputError, match="no column batch_size"):
        load("name,time,application,num_replicas\na,0,bert,6\n")
