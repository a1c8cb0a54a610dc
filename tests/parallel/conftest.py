"""The rank processes of tests/parallel; see ranks.py."""

from ranks import rank_pool

__all__ = ["rank_pool"]
