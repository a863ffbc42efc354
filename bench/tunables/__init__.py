"""Other loaders as `cellfeed_tuner.Tunable`, and which of them is the fastest on a machine."""
