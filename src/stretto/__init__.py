"""Stretto decides how many GPUs each training run gets, minute by minute.

Jobs: `simulate` runs a workload under a policy, `decide` asks a policy once, `run` trains several jobs.
Workloads: `catalogue_job` and `own_job` make simulated jobs.
Studies: `read_study` reads a study file, `plan` says what it takes and costs, `simulate_study` runs it under
a policy, `tune` trains it. `load_curves` reads the learning curves of simulated trials.

A wrong argument raises an `InputError`. Every name is imported when it is first used.
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
    from stretto.simulation.jobs import Setup, SimulationResult, simulate
    from stretto.simulation.jobs import SimulationResult as Run
    from stretto.simulation.plan import Planned, plan
    from stretto.simulation.studies import StudyResult, StudyRun, simulate_study
    from stretto.simulation.workloads import catalogue_job, own_job
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
    "SimulationResult",
    "StudyFile",
    "StudyResult",
    "StudyRun",
    "TrialResult",
    "TuneResult",
    "__version__",
    "catalogue_job",
    "decide",
    "load_curves",
    "own_job",
    "plan",
    "read_snapshot",
    "read_study",
    "run",
    "simulate",
    "simulate_study",
    "tune",
]

_HOME = {
    "stretto.core.errors": ("InputError",),
    "stretto.inputs.snapshot": ("read_snapshot",),
    "stretto.inputs.study": ("StudyFile", "read_study"),
    "stretto.launch.jobs": ("run",),
    "stretto.launch.tune": ("tune",),
    "stretto.runs.job_results": ("JobResult", "RunResult"),
    "stretto.runs.results": ("TrialResult", "TuneResult"),
    "stretto.simulation.decide": ("Answer", "decide"),
    "stretto.simulation.jobs": ("Setup", "SimulationResult", "simulate"),
    "stretto.simulation.plan": ("Planned", "plan"),
    "stretto.simulation.studies": ("StudyResult", "StudyRun", "simulate_study"),
    "stretto.simulation.workloads": ("catalogue_job", "own_job"),
    "stretto.worlds.curve_files": ("load_curves",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    name = "SimulationResult" if name == "Run" else name  # its name in 0.1
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
