"""A worker that lends memory, and the process that it is lent to, in one process."""

import os
import pickle

import numpy as np

from cellfeed._bytes._buffers import SharedPool
from cellfeed._dataset._workers import Arrivals, Departures, connected, message_of

N_VALUES = 20_000  # more than are pickled


class Both:
    """A worker and its consumer."""

    def __init__(self):
        receiving, sending = connected()
        self.arrivals = Arrivals(receiving)
        self.pool = SharedPool()
        self.departures = Departures(
            sending, self.arrivals.key, are_rows_placed=True, pool=self.pool
        )
        self._files = {}

    def placed(self, value, n=N_VALUES):
        """Return values in memory that is lent, as a reader places them there."""
        array = self.pool.acquire(4 * n).array(np.dtype(np.float32), n)
        array[:] = value
        self._files |= {number: os.dup(each) for number, each in self.pool.unsent.items()}
        return array

    def send(self, what):
        message = message_of(what, self.departures)
        assert message is not None
        return pickle.loads(pickle.dumps(message))

    @property
    def resident_bytes(self):
        return sum(os.fstat(each).st_blocks for each in self._files.values()) * 512

    def close(self):
        for each in self._files.values():
            os.close(each)
