"""Asks a policy for a decision. The mistake of a policy that a user wrote becomes one sentence."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from pathlib import Path

import numpy as np

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.decision import Decision, Reason
from stretto.core.errors import PolicyError, StrettoError
from stretto.policies.base import ClusterView, Memory, Policy, is_built_in

_SIGNATURES = {
    "decide": "decide(self, view, memory, rng)",
    "key": "key(self, job)",
    "size": "size(self, job, view)",
}


def ask(
    policy: Policy, view: ClusterView, memory: Memory, rng: np.random.Generator
) -> tuple[Decision, Memory]:
    """What the policy decides. PolicyError if a policy that is not built in raises or returns nonsense."""
    if is_built_in(policy):
        return policy.decide(view, memory, rng)
    try:
        answer: object = policy.decide(view, memory, rng)
    except StrettoError:
        raise
    except Exception as error:
        raise _mistake(policy, _raised(policy, error)) from error
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Decision)):
        raise _mistake(policy, f"decide returned {_named(answer)}; it must return (Decision, memory)")
    wrong = _wrong_part(answer[0])
    if wrong is not None:
        raise _mistake(policy, wrong)
    return answer[0], answer[1]


def _mistake(policy: Policy, problem: str) -> PolicyError:
    target = _target(type(policy))
    return PolicyError(
        f"policy {policy.name}: {problem}.",
        remedy=f"`stretto check-policy {target}` shows more." if target else "",
    )


def _raised(policy: Policy, error: Exception) -> str:
    """What it raised, and the last line of the policy's own file that led to it."""
    said = f"{type(error).__name__}: {str(error).strip().rstrip('.') or 'without a message'}"
    file = _file(type(policy))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if file and Path(one.filename) == file]
    if frames:
        return f"{said} in {Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    called = re.search(r"(\w+)\(\) (?:takes|missing|got)", str(error))
    if isinstance(error, TypeError) and called and called[1] in _SIGNATURES:
        return f"{said}; define it as {_SIGNATURES[called[1]]}"
    return said


def _named(answer: object) -> str:
    if answer is None:
        return "None"
    if isinstance(answer, Decision):
        return "a Decision without memory"
    kinds = ", ".join(type(one).__name__ for one in answer) if isinstance(answer, tuple) else ""
    return f"({kinds})" if kinds else f"an object of type {type(answer).__name__}"


def _wrong_part(decision: Decision) -> str | None:
    """Which value of a decision has the wrong type."""
    parts = (
        ("allocations", decision.allocations, Allocation),
        ("batches", decision.batches, BatchChoice),
        ("reasons", decision.reasons, Reason),
    )
    for part, values, kind in parts:
        if not hasattr(values, "items"):
            return f"{part} of its Decision is {values!r}; it must be a dict of {kind.__name__} by job id"
        for job_id, value in values.items():
            if not isinstance(value, kind):
                return f"{part}[{job_id!r}] of its Decision is {value!r}; it must be of type {kind.__name__}"
    return None


def _file(kind: type) -> Path | None:
    """The file that defines a class; None if there is none."""
    module = sys.modules.get(kind.__module__)
    name = getattr(module, "__file__", None)
    return Path(name).absolute() if name else None


def _target(kind: type) -> str | None:
    """How `check-policy` is given a class; None if it cannot be imported from a file."""
    file = _file(kind)
    if file is None or "." in kind.__qualname__ or inspect.isabstract(kind):
        return None
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{kind.__name__}"
