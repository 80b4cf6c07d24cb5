"""Names of curvature matrices."""

from __future__ import annotations


class Curvature:
    """Matrix that is approximated."""

    GGN = "GGN"
