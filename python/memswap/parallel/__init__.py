"""Sharded weights and exchanges between ranks: the process groups' side of memswap."""
