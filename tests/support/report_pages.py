"""What tests of HTML pages share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.report.plotting import packed_plotly
from stretto.runs.results import TrialResult, TuneResult
from stretto.search.study import Study
from study_inputs import SMALL_STUDY, study_file

STUDY = study_file(SMALL_STUDY).tuning.study


def without_plotly(page: str) -> str:
    assert page.count(packed_plotly()) == 1, "plotly.js is in the page once"
    return page.replace(packed_plotly(), "")


def figures(page: str) -> list[dict[str, Any]]:
    found = re.findall(
        r'<script type="application/json" id="figure-\d+-data">(.*?)</script>', page, re.DOTALL
    )
    return [json.loads(text) for text in found]


def result_of(names: Sequence[str], study: Study) -> TuneResult:
    """Trials with the same best value."""
    trials = [
        TrialResult(
            id=name, config={}, state="finished", epochs=1, best_metric=0.5, retries=0, error="",
            log=Path("log"), checkpoint=None,
        )
        for name in names
    ]  # fmt: skip
    return TuneResult(
        run=Path(study.name), policy="p", metric=study.metric, ended_by="jobs", best_trial=names[0],
        best_config={}, best_metric=0.5, checkpoint=None, cost_usd=0.0, finished_s=1.0, gpu_hours=0.0,
        predicted_finish_s=None, predicted_cost_usd=None, trials=tuple(trials),
    )  # fmt: skip
