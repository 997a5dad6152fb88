"""Stretto decides how many GPUs each training run gets, minute by minute.

`simulate` replays a workload under a policy, `decide` asks a policy once; `read_study` reads a study's file,
`plan` says what it will take, `simulate_study` runs it under a policy, `tune` trains it, on this machine or a
Ray cluster, and `run` several jobs; `load_curves` has what trials show in simulations. What a caller got
wrong raises an `InputError`. All are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.core.errors import InputError
    from stretto.inputs.snapshot import read_snapshot
    from stretto.inputs.study import StudyFile, read_study
    from stretto.launch.jobs import run
    from stretto.launch.tune import tune
    from stretto.runs.job_results import JobResult, RunResult
    from stretto.runs.results import TrialResult, TuneResult
    from stretto.simulation.decide import Answer, decide
    from stretto.simulation.jobs import Run, Setup, simulate
    from stretto.simulation.plan import Planned, plan
    from stretto.simulation.studies import StudyResult, StudyRun, simulate_study
    from stretto.worlds.curve_files import load_curves

__version__ = "0.2.0"
__all__ = [
    "Answer",
    "InputError",
    "JobResult",
    "Planned",
    "Run",
    "RunResult",
    "Setup",
    "StudyFile",
    "StudyResult",
    "StudyRun",
    "TrialResult",
    "TuneResult",
    "__version__",
    "decide",
    "load_curves",
    "plan",
    "read_snapshot",
    "read_study",
    "run",
    "simulate",
    "simulate_study",
    "tune",
]

_HOME = {
    "Answer": "stretto.simulation.decide",
    "decide": "stretto.simulation.decide",
    "Planned": "stretto.simulation.plan",
    "plan": "stretto.simulation.plan",
    "TrialResult": "stretto.runs.results",
    "TuneResult": "stretto.runs.results",
    "JobResult": "stretto.launch.jobs",
    "RunResult": "stretto.launch.jobs",
    "run": "stretto.launch.jobs",
    "tune": "stretto.launch.tune",
    "InputError": "stretto.core.errors",
    "load_curves": "stretto.worlds.curve_files",
    "Run": "stretto.simulation.jobs",
    "Setup": "stretto.simulation.jobs",
    "simulate": "stretto.simulation.jobs",
    "read_snapshot": "stretto.inputs.snapshot",
    "StudyFile": "stretto.inputs.study",
    "read_study": "stretto.inputs.study",
    "StudyResult": "stretto.simulation.studies",
    "StudyRun": "stretto.simulation.studies",
    "simulate_study": "stretto.simulation.studies",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
