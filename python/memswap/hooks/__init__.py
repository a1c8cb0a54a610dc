"""What memswap puts on a user's modules: which blocks, which hooks, and what takes them off."""
