"""Timing one configuration in a process of its own, and what is kept of it."""
