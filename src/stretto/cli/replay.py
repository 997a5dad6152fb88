"""`stretto simulate --replay` of a study: the real run beside simulations under other policies."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from stretto.cli.flags import nothing_to_replay
from stretto.core.units import format_duration, format_usd
from stretto.policies.registry import Options
from stretto.report.tables import HEADING, hours_text, policy_row
from stretto.report.text import markdown_table
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RunFolder
from stretto.runs.results import TuneResult
from stretto.search.study import Study
from stretto.simulation.replay import Replayed, StudyReplay, replay
from stretto.simulation.studies import StudyResult
from stretto.worlds.replay import ValueSource

WORDS = {
    ValueSource.RECORDED: "as recorded",
    ValueSource.EXTRAPOLATED: "extrapolated",
    ValueSource.DRAWN: "of others",
}
"""Column titles: the origin of the epochs that a policy saw."""
MIGHT = "might be"
"""Column title: the best value if unseen epochs follow the extrapolated curves."""


def compare_replay(folder: RunFolder, policies: Sequence[str], options: Options, *, as_json: bool) -> None:
    """Simulate the trials of the run under every policy, and print the results beside the real one."""
    found = replay(folder, policies, options=options)
    if not found.replayed:
        raise nothing_to_replay(folder.path)
    for note in found.notes:
        print(f"{folder.name}: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(_json(found), indent=2, allow_nan=False))
        return
    rows = [[*_with_range(_really(found.actual), ""), *("" for _ in WORDS)]]
    rows += [
        [*_with_range(_row(found.study, one.result), _range(one)), *_shares(one)] for one in found.replayed
    ]
    title = (
        f"{found.study.name}: best recorded {found.study.metric} ({found.study.direction}), real and replayed"
    )
    heading = [*_with_range(_without_worst(HEADING), MIGHT), *WORDS.values()]
    print(f"{title}\n\n{markdown_table(heading, rows)}")


def _with_range(cells: Sequence[str], text: str) -> list[str]:
    """The cells of a row with another cell after the best value."""
    after = _without_worst(HEADING).index("best") + 1
    return [*cells[:after], text, *cells[after:]]


def _range(one: Replayed) -> str:
    return "-" if one.extrapolated is None else one.extrapolated.text


def _row(study: Study, result: StudyResult) -> list[str]:
    return _without_worst(policy_row(study, result.policy, [result]))


def _without_worst(cells: Sequence[str]) -> list[str]:
    """Leave out the worst seed: a replay has only one."""
    return [cell for cell, name in zip(cells, HEADING, strict=True) if name != "worst seed"]


def _really(actual: TuneResult) -> list[str]:
    """The real run as a row of the table."""
    best = "none" if actual.best_metric is None else f"{actual.best_metric:.4f}"
    return [
        f"{actual.policy} (real)",
        best,
        str(sum(trial.epochs > 0 for trial in actual.trials)),
        hours_text(actual.gpu_hours),
        format_usd(actual.cost_usd),
        format_duration(actual.finished_s),
        "trials" if actual.ended_by == EndedBy.JOBS else actual.ended_by,
    ]


def _shares(one: Replayed) -> list[str]:
    return [f"{one.shares[origin]:.0%}" for origin in WORDS]


def _json(found: StudyReplay) -> dict[str, Any]:
    return {
        "actual": found.actual.as_dict(),
        "runs": [
            {
                **dataclasses.asdict(one.result),
                "extrapolated_best": None
                if one.extrapolated is None
                else dataclasses.asdict(one.extrapolated),
                "shares": {str(origin): share for origin, share in one.shares.items()},
            }
            for one in found.replayed
        ],
    }
