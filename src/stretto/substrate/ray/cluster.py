"""The connection to a Ray cluster: one that is there, or one of our own on this machine."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from stretto.core.errors import InputError

_CONNECT_S = 60.0
"""A driver that lacks the cluster's token asks for ever."""


@contextmanager
def connected(address: str | None, *, slots: int | None = None) -> Iterator[str]:
    """Be part of the cluster at an address, of the one this machine is in, or of a new one here.

    Gives the cluster's address. Only a new one is stopped in the end.
    """
    if address is not None:
        _show_token()
    ray = _ray()
    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"namespace": "stretto", "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        _init(ray, address or "auto", quiet)
    except ConnectionError as error:
        if address is not None:
            raise _unreachable(address, error) from error
        ray.init(address="local", num_cpus=slots, include_dashboard=False, **quiet)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def is_our_own() -> bool:
    """Whether the cluster that this process is connected to was started by it."""
    node = _ray()._private.worker._global_node  # noqa: SLF001 - Ray has no public word for it
    return node is not None and bool(node.head)


def _show_token() -> None:
    """Ray shows the token there is only to a cluster that it finds itself; let it, unless told otherwise.

    It reads that setting once, when it is imported.
    """
    kept = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if "ray" not in sys.modules and ("RAY_AUTH_TOKEN" in os.environ or kept.is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError("Ray is not installed.", remedy="pip install 'stretto[ray]'.") from error


def _init(ray: ModuleType, address: str, quiet: dict[str, object]) -> None:
    failures: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address=address, **quiet)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            failures.append(error)

    waits = threading.Thread(target=init, name="connect to Ray", daemon=True)
    waits.start()
    waits.join(_CONNECT_S)
    if waits.is_alive():
        raise _unreachable(address, f"it did not answer within {_CONNECT_S:g} s")
    if failures:
        raise failures[0]


def _unreachable(address: str, why: object) -> InputError:
    return InputError(
        f"the Ray cluster at {address} cannot be reached: {why}.",
        remedy="Run this on a node of the cluster, with --on ray; or give the address that `ray start` "
        "printed. A cluster with a token wants RAY_AUTH_MODE=token and the token in ~/.ray/auth_token, one "
        "without RAY_AUTH_MODE=disabled.",
    )
