"""What tests of HTML pages share."""

from __future__ import annotations

import json
import re
from typing import Any

from stretto.report.plotting import packed_plotly


def without_plotly(page: str) -> str:
    assert page.count(packed_plotly()) == 1, "plotly.js is in the page once"
    return page.replace(packed_plotly(), "")


def figures(page: str) -> list[dict[str, Any]]:
    found = re.findall(
        r'<script type="application/json" id="figure-\d+-data">(.*?)</script>', page, re.DOTALL
    )
    return [json.loads(text) for text in found]
