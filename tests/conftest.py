"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes is the machine's affair; a run that fails must fail again when it is repeated.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")
