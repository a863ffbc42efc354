"""Where the time per cell goes, and what other storage layouts would give."""
