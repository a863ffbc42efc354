"""The asv suite: how fast, how much memory, what is read, how well mixed. Lower is better.

Figures that are tracked (``track_``) are deterministic, and `bench/suite` holds commits against
them; times and memory advise.
"""
