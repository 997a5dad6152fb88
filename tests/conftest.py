"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("patient")
