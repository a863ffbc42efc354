"""The parts of `cellfeed.synthetic`: the experiment, its expression, and its files."""
