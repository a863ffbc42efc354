"""Other loaders as `cellfeed_tuner.Tunable`, and which of them suits a machine."""
