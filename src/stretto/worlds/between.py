"""Linear interpolation between scattered points in three dimensions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stretto.models.speed import Floats

Integers = npt.NDArray[np.int64]


class LinearBetween:
    """Interpolates in the tetrahedra of the Delaunay triangulation of points with whole coordinates.

    Whole coordinates make volumes exact, so that a point on the border is inside; where two neighbours cut
    the face between them differently, the first in the triangulation counts. The volumes are taken
    with cross products because scipy's own interpolator asks LAPACK once per tetrahedron, and a BLAS with
    threads turns that into many seconds on a busy machine.
    """

    def __init__(self, points: Integers, values: Floats) -> None:
        from scipy.spatial import Delaunay  # noqa: PLC0415  (slow to import)

        simplices = Delaunay(points).simplices
        corners = points[simplices]
        base = corners[:, 3]
        a, b, c = (corners[:, i] - base for i in range(3))
        faces = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=1)
        volume = np.einsum("si,si->s", a, faces[:, 0])
        solid = volume != 0
        self._base = base[solid]
        self._faces = faces[solid] * np.sign(volume[solid])[:, None, None]
        self._volume = np.abs(volume[solid])
        self._values = values[simplices[solid]]

    def at(self, point: Integers) -> Floats | None:
        """The values at a point; None outside the convex hull."""
        shares = np.einsum("sfi,si->sf", self._faces, point - self._base)
        rest = self._volume - shares.sum(axis=1)
        inside = np.flatnonzero((shares >= 0).all(axis=1) & (rest >= 0))
        if not inside.size:
            return None
        first = inside[0]
        weights = np.append(shares[first], rest[first]) / self._volume[first]
        return np.asarray(weights @ self._values[first], dtype=float)
