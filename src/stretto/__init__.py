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
    from stretto.app.decide import Answer, decide
    from stretto.app.plan import Planned, plan
    from stretto.app.real_result import TrialResult, TuneResult
    from stretto.app.run_jobs import JobResult, RunResult, run
    from stretto.app.simulate import Run, Setup, simulate
    from stretto.app.snapshot import read_snapshot
    from stretto.app.study_file import StudyFile, read_study
    from stretto.app.study_run import StudyResult, StudyRun, simulate_study
    from stretto.app.tune import tune
    from stretto.core.errors import InputError
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
    "Answer": "stretto.app.decide",
    "decide": "stretto.app.decide",
    "Planned": "stretto.app.plan",
    "plan": "stretto.app.plan",
    "TrialResult": "stretto.app.real_result",
    "TuneResult": "stretto.app.real_result",
    "JobResult": "stretto.app.run_jobs",
    "RunResult": "stretto.app.run_jobs",
    "run": "stretto.app.run_jobs",
    "tune": "stretto.app.tune",
    "InputError": "stretto.core.errors",
    "load_curves": "stretto.worlds.curve_files",
    "Run": "stretto.app.simulate",
    "Setup": "stretto.app.simulate",
    "simulate": "stretto.app.simulate",
    "read_snapshot": "stretto.app.snapshot",
    "StudyFile": "stretto.app.study_file",
    "read_study": "stretto.app.study_file",
    "StudyResult": "stretto.app.study_run",
    "StudyRun": "stretto.app.study_run",
    "simulate_study": "stretto.app.study_run",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
