"""One root seed; every stream of random numbers is keyed by its purpose and an id."""

from __future__ import annotations

import hashlib

import numpy as np


def child_rng(root: int, purpose: str, key: str = "") -> np.random.Generator:
    """A generator of its own for (purpose, key): adding a job disturbs no other job's stream."""
    digest = hashlib.sha256(f"{root}\x00{purpose}\x00{key}".encode()).digest()
    words = np.frombuffer(digest[:16], "<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
