"""A planned step for people: its memory drawn, and its transfers as a trace."""
