"""Factored gradients, eigenvalue-corrected factors, influence and kernels beside the libraries that
are made for one of them: ``python -m benchmark.families``. See ``benchmark/README.md``.
"""
