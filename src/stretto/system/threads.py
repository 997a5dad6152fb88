"""One thread for linear algebra: our matrices are tiny, so more threads would only cost time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit every BLAS library of this process to one thread."""
    import scipy.linalg  # noqa: F401, PLC0415  (only loaded libraries can be limited)

    with threadpool_limits(limits=1, user_api="blas"):
        yield
