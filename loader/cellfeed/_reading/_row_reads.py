"""Everything that one fetch reads, over many sources, known before there is memory for it."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkReads
from cellfeed._layouts import CsrTarget, RowTarget
from cellfeed._runs import Runs
from cellfeed._sources import StoredElement

__all__ = ["OtherRead", "RowReads"]


@dataclass(frozen=True, slots=True)
class OtherRead:
    """Rows of an element whose storage reads them by itself, one run after the other.

    Parameters
    ----------
    element, runs
        What is read.
    target
        Where it goes, before memory is bound to it.
    """

    element: StoredElement
    runs: Runs
    target: RowTarget


@dataclass(frozen=True, slots=True)
class RowReads:
    """The reads of one fetch.

    Parameters
    ----------
    chunks
        Those from chunks, of all elements and sources together.
    others
        Those that sources do by themselves.
    """

    chunks: ChunkReads
    others: Sequence[OtherRead]

    def readahead(self) -> None:
        """Tell the system what will be read soon, so that it is there when it is."""
        self.chunks.readahead()

    def run(self, bases: NDArray[np.int64], threads: Executor, n_threads: int) -> bool:
        """Read everything into memory.

        Parameters
        ----------
        bases
            Address of each group of rows, of which destinations count.
        threads, n_threads
            Who reads and decodes, and how many of them.

        Returns
        -------
        Whether the columns of every sparse row ascend strictly.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        ordered = self.chunks.run(bases, threads, n_threads).ascending
        for other in self.others:
            target = other.target.bound(bases)
            other.element.read_into(other.runs, target)
            ordered &= not isinstance(target, CsrTarget) or bool(target.ordered[0])
        return ordered
