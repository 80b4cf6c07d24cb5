"""Functions in a ``forward`` become modules: by tracing, or by recording while it runs."""
