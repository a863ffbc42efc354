"""Loaders that take their time, in a module that a measuring process can import."""

import time

from cellfeed import CellDataset


class Slow(CellDataset):
    """Each minibatch takes 20 ms more, so that it is looked what is cached after each fetch."""

    def __iter__(self):
        for minibatch in super().__iter__():
            time.sleep(0.02)
            yield minibatch
