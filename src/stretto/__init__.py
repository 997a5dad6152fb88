"""Stretto decides how many GPUs each training run gets, minute by minute.

`simulate` replays a workload under a policy, `decide` asks a policy once; both are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.app.decide import Answer, decide
    from stretto.app.simulate import Run, Setup, simulate
    from stretto.app.snapshot import read_snapshot

__version__ = "0.1.0"
__all__ = ["Answer", "Run", "Setup", "__version__", "decide", "read_snapshot", "simulate"]

_HOME = {
    "Answer": "stretto.app.decide",
    "decide": "stretto.app.decide",
    "Run": "stretto.app.simulate",
    "Setup": "stretto.app.simulate",
    "simulate": "stretto.app.simulate",
    "read_snapshot": "stretto.app.snapshot",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
