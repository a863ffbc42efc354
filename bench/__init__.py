"""The asv suite: speed, memory, bytes read, mixing. Lower is better.

Tracked figures (``track_``) are deterministic, and `bench/suite` fails a commit that makes them
worse; times and memory are only reported.
"""
