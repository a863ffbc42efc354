"""The search, played on recorded grids in place of a disk."""
