"""Which configuration to measure next, and which to recommend; played on recorded grids too."""
