"""Which rounds of an epoch count, where so many fetches are asked of a server at its start.

They come in one round trip, and the rounds that deliver them take no time that a later one would
take. So rounds count once all of these are delivered, or once as much time has gone by as the
start took: by then it is the link or the decoding that sets the pace. Where epochs are so short
that they are mostly start, as of any training then, later ones count as a whole.
"""

from cellfeed_tuner._constants import LONG_EPOCH

__all__ = ["CountedRounds"]


class CountedRounds:
    """Says of one round after the other whether it counts.

    ``n_asked`` rounds are asked for at the start of an epoch; 0 if the files are on this machine.
    Worker processes are started anew in each epoch.

    Examples
    --------
    >>> rounds = CountedRounds(n_rounds=6, n_asked=1, has_workers=False)
    >>> [rounds.counts(number, 1.0 if number == 0 else 0.1) for number in range(6)]
    [False, False, True, True, True, True]
    >>> rounds = CountedRounds(n_rounds=3, n_asked=1, has_workers=False)
    >>> [rounds.counts(number, 0.1) for number in range(3)]
    [False, False, True]
    >>> rounds = CountedRounds(n_rounds=3, n_asked=1, has_workers=False)
    >>> [rounds.counts(number, 1.0 if number == 0 else 0.1) for number in [0, 1, 2, 0, 1, 2]]
    [False, False, False, True, True, True]
    """

    def __init__(self, *, n_rounds: int, n_asked: int, has_workers: bool) -> None:
        self._n_rounds, self._n_asked, self._has_workers = n_rounds, n_asked, has_workers
        self._is_first_epoch, self._counts_whole = True, False
        self._start_seconds = self._since = 0.0
        self._has_counted = False

    def counts(self, number: int, seconds: float) -> bool:
        """Return whether a round counts; each is told of once, in order."""
        if number == 0:
            self._start_seconds, self._since, self._has_counted = seconds, 0.0, False
        counted = self._is_counted(number)
        self._has_counted |= counted
        if number:
            self._since += seconds
        if number == self._n_rounds - 1:
            self._is_first_epoch = False
            self._counts_whole |= not self._has_counted
        return counted

    def may_end(self, number: int) -> bool:
        """Return whether measuring may end after a round: not amid an epoch that counts whole."""
        return not self._counts_whole or number == self._n_rounds - 1

    def _is_counted(self, number: int) -> bool:
        if number == 0 and (self._is_first_epoch or self._has_workers):
            return False
        if not self._n_asked or self._counts_whole:
            # Without workers, the first round of a later epoch is a round like any other.
            return True
        is_long = self._n_rounds >= LONG_EPOCH * (self._n_asked + 1)
        if is_long and number > self._n_asked:
            return True
        return number > 0 and self._since >= self._start_seconds
