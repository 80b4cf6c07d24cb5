"""The engine: what is recorded, how quantities travel back, and the derivatives of the modules."""
