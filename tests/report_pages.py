"""What tests of HTML pages share."""

from __future__ import annotations

import json
import re
from typing import Any

from stretto.report.plotting import plotly_script


def without_plotly(page: str) -> str:
    assert page.count(plotly_script()) == 1, "plotly.js is in the page once"
    return page.replace(plotly_script(), "")


def figures(page: str) -> list[dict[str, Any]]:
    found = re.findall(
        r'<script type="application/json" id="figure-\d+-data">(.*?)</script>', page, re.DOTALL
    )
    return [json.loads(text) for text in found]
