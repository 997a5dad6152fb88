"""Finding the training function that `path/to/train.py:function` names."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.core.errors import InputError
from stretto.torch.foreign import refuse_own_groups


def split_entry(entry: str) -> tuple[Path, str]:
    """The file and the function of an entry."""
    path, colon, function = entry.rpartition(":")
    if not colon or not path or not function.isidentifier():
        raise InputError(
            f"{entry!r} does not name a training function.",
            remedy="Write FILE:FUNCTION, such as train.py:train.",
        )
    return Path(path).absolute(), function


def load_entry(entry: str) -> Callable[..., Any]:
    """The function, its file imported once per process. What the file itself raises is passed on."""
    path, name = split_entry(entry)
    refuse_own_groups()
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(
            sorted(n for n, v in vars(module).items() if callable(v) and v.__module__ == module.__name__)
        )
        raise InputError(f"{path} has no function {name!r}.", remedy=f"It has: {there or 'none'}.")
    found: Callable[..., Any] = function
    return found


@functools.cache
def _load(path: Path) -> ModuleType:
    """Import a file under its own name, with its folder first on the path, as `python FILE` would."""
    if not path.is_file():
        raise InputError(f"{path} is not a file.", remedy="Give the path of the training script.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.", remedy="Give the path of the training script.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
