"""One search for several ranks, whose result all of them have."""
