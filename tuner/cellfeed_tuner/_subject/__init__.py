"""What is tuned: a loader, by what the tuner needs to know of it."""
