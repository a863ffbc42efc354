"""What `cellfeed.synthetic` is made of: the experiment, its expression, and its files."""
