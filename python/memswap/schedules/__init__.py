"""Schedules for modules' saved activations, and the doors to them: chain, towers and pipeline."""
