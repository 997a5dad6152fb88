"""One thread for linear algebra: matrices of a fit are tiny, and more threads only cost time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Holds every BLAS of this process to one thread."""
    import scipy.linalg  # noqa: F401, PLC0415  (a library can be held back only once it is loaded)

    with threadpool_limits(limits=1, user_api="blas"):
        yield
