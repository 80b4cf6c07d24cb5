"""Side-by-side benchmark of this library, its peers and the floor that the machine sets.

``make benchmark`` runs it all, ``make benchmark-quick`` the part that fits into five minutes;
``python -m benchmark --help`` lists what can be chosen. See ``benchmark/README.md``.
"""
