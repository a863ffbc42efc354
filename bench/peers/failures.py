"""What ends a row of the comparison, and not the comparison."""


class FailedError(Exception):
    """A peer cannot be installed, started or believed; the message says why in one line."""
