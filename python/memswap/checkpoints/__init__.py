"""What a checkpoint region is made of: its policy, what it saved, and how that is replayed."""
