"""What ``python -m memswap`` runs: one file per concept, no part of the engine."""
