"""What earlier runs found, kept by fingerprints, and what it is worth today."""
