"""A whole grid, measured once and kept, so that searches can be played on it."""
