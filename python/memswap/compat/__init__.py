"""Other systems' names and call patterns on memswap's engine."""
