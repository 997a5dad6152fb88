"""Random numbers: one root seed, and independent streams keyed by purpose and id."""

from __future__ import annotations

import hashlib

import numpy as np


def child_rng(root: int, purpose: str, key: str = "") -> np.random.Generator:
    """The generator of (purpose, key); adding a job does not change another job's numbers."""
    digest = hashlib.sha256(f"{root}\x00{purpose}\x00{key}".encode()).digest()
    words = np.frombuffer(digest[:16], "<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
