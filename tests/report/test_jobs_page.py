"""The page: every section is there, nothing is loaded, nothing written by users is taken for markup."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
import sys
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from report_pages import figures, without_plotly
from stretto.core.cluster import gpu_nodes
from stretto.core.errors import InputError
from stretto.report.jobs_page import _label, report_html, write_report
from stretto.report.plotting import Palette
from stretto.simulation.jobs import Setup, SimulationResult, simulate
from stretto.worlds.applications import Configuration, builtin_catalogue
from stretto.worlds.truth import Workload, make_workload

SETUP = Setup(nodes=gpu_nodes(2, 4), restart_s=10.0)
EVIL_JOB = "<img src=http://x onerror=alert(1)>"
EVIL_NAME = "</script><script>alert(2)</script>"


def workload(name: str, *, job_id: str = "ncf-0", application: str = "ncf") -> Workload:
    apps = builtin_catalogue()
    known = [
        (apps.get("ncf").job(job_id, 0.0, Configuration(1, 32768)), apps.get("ncf").truth),
        (apps.get("bert").job("bert-1", 60.0, Configuration(8, 384)), apps.get("bert").truth),
        (apps.get("bert").job("bert-2", 90.0, Configuration(8, 384)), apps.get("bert").truth),
    ]
    first, truth = known[0]
    known[0] = (dataclasses.replace(first, application=application), truth)
    return make_workload(name, known, notes=("One <i>note</i>.",))


@pytest.fixture(scope="module")
def runs() -> list[SimulationResult]:
    return [simulate(workload("small"), policy, SETUP) for policy in ("fifo", "tiresias")]


@pytest.fixture(scope="module")
def page(runs: list[SimulationResult]) -> str:
    return report_html(runs)


def test_every_section_is_there(page: str) -> None:
    heads = re.findall(r'<h[23] id="s\d+">(.*?)</h[23]>', page)
    assert heads == [
        "Summary",
        "Workload small",
        "How long jobs took",
        "Who held which GPUs",
        "Over time",
        "The models",
        "Pollux: throughput, efficiency, goodput",
        "Optimus: convergence and speed",
        "About these numbers",
    ]
    for anchor in re.findall(r'href="#(s\d+)"', page):
        assert f'id="{anchor}"' in page


def test_every_figure_has_data_and_named_axes(page: str) -> None:
    found = figures(page)
    assert len(found) == 2 + 2 + 1 + 4 + 3
    assert all(figure["data"] for figure in found)
    assert "simulated, not measured" in page
    assert "10 s without progress" in page


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    frame = without_plotly(page)
    assert not re.search(r'(src|href)\s*=\s*["\']?\s*(https?:)?//', frame)
    assert "<link" not in frame
    assert "@import" not in frame
    assert "default-src 'none'" in frame
    assert "sendChartToCloud" not in frame
    assert len(page) < 3_000_000


def test_plotly_is_packed_whole(page: str) -> None:
    (packed,) = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', page)
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert 'DecompressionStream("gzip")' in page


def test_a_rectangle_tells_job_gpus_batch_time_and_reason(page: str) -> None:
    (hover,) = [
        row for trace in figures(page)[2]["data"] for row in trace.get("customdata", []) if row[0] == "bert-2"
    ]
    assert hover[1] == "8 GPUs, batch 384"
    assert " to " in hover[2]
    assert hover[3].startswith("started: ")


def test_names_with_markup_stay_text() -> None:
    run = simulate(workload(EVIL_NAME, job_id=EVIL_JOB, application="<b>app"), "fifo", SETUP)
    page = without_plotly(report_html([run]))
    assert "<img" not in page
    assert "<script>alert" not in page
    assert "<b>app" not in page
    assert "<i>note" not in page
    assert "&lt;/script&gt;" in page
    shown = json.dumps(figures(page))
    assert "&lt;img src=http://x onerror=alert(1)&gt;" in shown
    assert "<img" not in shown


def test_several_workloads_have_a_section_each(runs: list[SimulationResult]) -> None:
    other = [simulate(workload("other"), run.metrics.policy, SETUP) for run in runs]
    page = without_plotly(report_html([*runs, *other]))
    assert "Workload small" in page
    assert "Workload other" in page
    assert "mean of 2 workloads" in page
    assert page.count("<details>") == page.count("</details>") == 1


def test_the_same_policy_twice_has_two_names(runs: list[SimulationResult]) -> None:
    assert [label for label, _ in _label([runs[0], runs[1], runs[0]])] == ["fifo", "tiresias", "fifo (2)"]


def test_unfinished_jobs_are_visible() -> None:
    run = simulate(workload("cut"), "fifo", dataclasses.replace(SETUP, until_s=120.0))
    page = without_plotly(report_html([run]))
    assert "class=unfinished>1/3" in page
    assert "fifo left 2 of 3 jobs unfinished" in page


def test_the_file_is_written_whole(runs: list[SimulationResult], tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", runs[:1])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")


def test_a_place_that_cannot_be_written_to_is_refused(
    runs: list[SimulationResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.report.jobs_page.report_html", lambda runs: f"{len(runs)} runs")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        write_report(tmp_path / "file" / "report.html", runs[:1])


def test_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no runs"):
        write_report(tmp_path / "report.html", [])


def test_without_plotly_the_remedy_is_named(
    runs: list[SimulationResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(InputError) as caught:
        write_report(tmp_path / "report.html", runs)
    assert "pip install 'stretto[report]'" in caught.value.remedy
    assert not (tmp_path / "report.html").exists()


def test_built_in_names_have_the_same_colours_on_every_page() -> None:
    few, many = Palette.of(["fifo"], ["ncf"]), Palette.of(["mine", "fifo"], ["aaa", "ncf"])
    assert few.policy("fifo") == many.policy("fifo")
    assert few.application("ncf") == many.application("ncf")
    assert len({many.policy(name).colour for name in ("pollux", "tiresias", "fifo")}) == 3
