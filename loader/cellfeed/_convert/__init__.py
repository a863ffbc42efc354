"""Collections written anew: shuffled, into a database, or synthetic."""
