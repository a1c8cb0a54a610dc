"""Benchmarks that a user runs on a machine of their own: ``python -m memswap bench``."""
