"""Modules for operations that PyTorch only offers as functions."""
