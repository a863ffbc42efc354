"""Timing one configuration in processes of its own."""
