"""The connection to a Ray cluster: an existing one, or a new one on this machine."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from stretto.core.errors import InputError
from stretto.substrate.local.slots import Slots, find_slots

_CONNECT_S = 60.0
"""Limit for connecting: without the cluster's token, Ray would retry forever."""
T = TypeVar("T")


@contextmanager
def connected(address: str | None, *, slots: int | None = None) -> Iterator[str]:
    """Connect to the cluster at `address`, else to this machine's, else start one with `slots` slots here.

    Yields the cluster's address. Only a cluster started here is stopped at the end. An existing connection of
    this process is used; InputError if it is to another cluster than `address`.
    """
    ray = _ray()
    if ray.is_initialized():
        if address is not None:
            _check_connected_to(ray, address)
        yield ray.get_runtime_context().gcs_address
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"namespace": "stretto", "log_to_driver": False, "logging_level": logging.ERROR}
    _keep_stdout_clean(ray)
    try:
        there = address or "auto"
        _within_patience(there, lambda: ray.init(address=there, **quiet))
    except ConnectionError as error:
        if address is not None:
            raise _unreachable(address, error) from error
        own = {} if slots is None else resources_of(slots, find_slots())
        ray.init(address="local", include_dashboard=False, **own, **quiet)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def _keep_stdout_clean(ray: ModuleType) -> None:
    """Send Ray's messages about its processes to the log; Ray prints them to stdout, without a setting."""

    def to_log(data: Mapping[str, Any], **_: object) -> None:
        for line in data.get("lines", ()):
            logging.getLogger("ray").info(line)

    ray._private.worker.print_to_stdstream = to_log  # noqa: SLF001


def is_our_own() -> bool:
    """Whether this process started the cluster it is connected to."""
    node = _ray()._private.worker._global_node  # noqa: SLF001 - Ray has no public function for this
    return node is not None and bool(node.head)


def resources_of(slots: int, machine: Slots) -> dict[str, int]:
    """The Ray resources that give this machine this many slots."""
    if not machine.has_gpus:
        return {"num_cpus": slots}
    if slots > len(machine):
        raise InputError(
            f"{slots} slots are more than the {len(machine)} GPUs of this machine, and Ray gives each a GPU "
            "of its own.",
            remedy=f"Give at most {len(machine)}; with --on local, slots share GPUs.",
        )
    return {"num_gpus": slots}


def _check_connected_to(ray: ModuleType, address: str) -> None:
    """InputError if `address` belongs to another cluster; a cluster has several addresses, but one id."""
    context = ray.get_runtime_context()
    if context.gcs_address == address:
        return
    raylet = importlib.import_module("ray._raylet")
    try:
        there = _within_patience(address, lambda: raylet.GcsClient(address=address).cluster_id)
    except InputError:
        raise
    except Exception as error:
        raise _unreachable(address, error) from error
    if there != context.worker.gcs_client.cluster_id:
        raise InputError(
            f"this process is connected to the Ray cluster at {context.gcs_address}, which is not the one at "
            f"{address}.",
            remedy="Leave the address out to train there; or call ray.shutdown() first.",
        )


def _ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError("Ray is not installed.", remedy="pip install 'stretto[ray]'.") from error


def _within_patience(address: str, ask: Callable[[], T]) -> T:
    answers: list[T] = []
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            failures.append(error)

    waits = threading.Thread(target=wait, name="connect to Ray", daemon=True)
    waits.start()
    waits.join(_CONNECT_S)
    if waits.is_alive():
        raise _unreachable(address, f"it did not answer within {_CONNECT_S:g} s")
    if failures:
        raise failures[0]
    return answers[0]


def _unreachable(address: str, why: object) -> InputError:
    return InputError(
        f"the Ray cluster at {address} cannot be reached: {why}.",
        remedy="Run this on a node of the cluster, with --on ray; or give the address that `ray start` "
        "printed. A cluster with a token wants RAY_AUTH_MODE=token and the token in ~/.ray/auth_token, one "
        "without RAY_AUTH_MODE=disabled.",
    )
