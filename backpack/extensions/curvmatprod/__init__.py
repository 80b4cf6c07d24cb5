"""Products with curvature blocks as functions."""
