"""A failure that ends a row of the comparison, but not the comparison."""


class FailedError(Exception):
    """A peer cannot be installed or started, or delivers wrong cells; the message is one line."""
