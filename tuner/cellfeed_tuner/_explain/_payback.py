"""After how many epochs a conversion is paid for."""

from math import ceil

__all__ = ["epochs_until_paid"]


def epochs_until_paid(
    *, conversion_seconds: float, epoch_seconds: float, epoch_seconds_then: float
) -> int | None:
    """Return after how many epochs a converted collection has saved what its conversion took.

    Parameters
    ----------
    conversion_seconds
        What the conversion takes, once.
    epoch_seconds, epoch_seconds_then
        What reading takes for an epoch of the files as they are, and of what they become. Where
        the training step takes longer than reading, it is the step that counts in either.

    Returns
    -------
    None if it is never paid for, since epochs then take as long, or longer.

    Examples
    --------
    >>> epochs_until_paid(conversion_seconds=120, epoch_seconds=60, epoch_seconds_then=20)
    3
    >>> epochs_until_paid(conversion_seconds=120, epoch_seconds=60, epoch_seconds_then=60) is None
    True
    """
    saved = epoch_seconds - epoch_seconds_then
    return max(1, ceil(conversion_seconds / saved)) if saved > 0 else None
