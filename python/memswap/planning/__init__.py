"""What to do with a saved tensor, and why."""
