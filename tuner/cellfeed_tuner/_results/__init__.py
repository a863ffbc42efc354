"""What ``autotune`` found, as records and as JSON."""
