"""Loaders that are wrong, each in its own way; a module, so that another process finds them."""

import errno
import os
import signal
import sys
import time
from itertools import islice

import numpy as np
import torch

from cellfeed import CellDataset, Minibatch


class _Wrong(CellDataset):
    """Delivers what `CellDataset` does, spoilt."""

    def __iter__(self):
        return map(self.spoilt, super().__iter__())

    def spoilt(self, minibatch):
        raise NotImplementedError


class AnotherOrder(CellDataset):
    """Minibatches come in another order."""

    def __iter__(self):
        minibatches = super().__iter__()
        for first, second in zip(minibatches, minibatches, strict=False):
            yield second
            yield first


class AnotherEpoch(CellDataset):
    """Minibatches are those of another epoch."""

    def __iter__(self):
        self.set_epoch(1)
        return super().__iter__()


class EndsEarly(CellDataset):
    """Five minibatches come, and no more."""

    def __iter__(self):
        return islice(super().__iter__(), 5)


class OtherRows(_Wrong):
    """Rows, labels and expression fit each other, but are not those of the plan."""

    def spoilt(self, minibatch):
        rows = (minibatch.rows.numpy() + 1) % len(self.collection)
        return self.collection[rows].to_torch()


class ConstantLabel(_Wrong):
    """All cells have the label of one file."""

    def spoilt(self, minibatch):
        obs = dict(minibatch.obs, plate=torch.zeros_like(minibatch.obs["plate"]))
        return Minibatch(minibatch.elements, obs, minibatch.rows)


class LabelsOfAnotherFile(_Wrong):
    """Codes are those that the file itself has, which mean something else in another."""

    def spoilt(self, minibatch):
        codes = (minibatch.obs["plate"] + 1) % 3
        return Minibatch(minibatch.elements, dict(minibatch.obs, plate=codes), minibatch.rows)


class NoLabels(_Wrong):
    """Minibatches lack what they are to carry."""

    def spoilt(self, minibatch):
        return Minibatch(minibatch.elements, {}, minibatch.rows)


class _WrongExpression(_Wrong):
    def spoilt_values(self, dense, minibatch):
        raise NotImplementedError

    def spoilt(self, minibatch):
        dense = self.spoilt_values(minibatch.X.to_dense(), minibatch)
        return Minibatch({"X": dense.to_sparse_csr()}, minibatch.obs, minibatch.rows)


class ValuesOfAnotherRow(_WrongExpression):
    """Each cell has the values of its neighbour."""

    def spoilt_values(self, dense, minibatch):
        rows = (minibatch.rows.numpy() + 1) % len(self.collection)
        return torch.from_numpy(self.collection[rows].X.toarray())


class OneValueOff(_WrongExpression):
    """One value of the first cell is off by one."""

    def spoilt_values(self, dense, minibatch):
        dense[0, 7] += 1
        return dense


class ShiftedColumns(_WrongExpression):
    """Genes are shifted by one."""

    def spoilt_values(self, dense, minibatch):
        return torch.roll(dense, 1, dims=1)


class RowsInAnotherOrder(_WrongExpression):
    """Cells of a minibatch have each other's values."""

    def spoilt_values(self, dense, minibatch):
        return dense.flip(0)


class FewerGenes(_WrongExpression):
    """The last gene is left out."""

    def spoilt_values(self, dense, minibatch):
        return dense[:, :-1]


class ColumnsBeyondTheLast(_Wrong):
    """Columns of sparse values lie outside the matrix."""

    def spoilt(self, minibatch):
        X = minibatch.X
        columns = X.col_indices() + X.shape[1]
        spoilt = torch.sparse_csr_tensor(
            X.crow_indices(), columns, X.values(), size=tuple(X.shape), check_invariants=False
        )
        return Minibatch({"X": spoilt}, minibatch.obs, minibatch.rows)


class FewerRowsOfExpression(_WrongExpression):
    """Expression lacks the last cell."""

    def spoilt_values(self, dense, minibatch):
        return dense[:-1]


def wrong_labels_of_the_collection(collection, *arguments, **parameters):
    """Both minibatches and the collection have other labels than the files."""
    codes = collection.obs["plate"].codes
    np.copyto(codes, (codes + 1) % 3)
    return CellDataset(collection, *arguments, **parameters)


class _Breaks(_Wrong):
    """Delivers 30 minibatches, and then does something else."""

    def __iter__(self):
        for number, minibatch in enumerate(super().__iter__()):
            if number == 30:
                self.breaks()
            yield minibatch

    def spoilt(self, minibatch):
        return minibatch

    def breaks(self):
        raise NotImplementedError


class Hangs(_Breaks):
    """Waits for ever."""

    def breaks(self):
        time.sleep(10_000)


class Exits(_Breaks):
    """Ends the process without a word."""

    def breaks(self):
        os._exit(3)


class Leaves(_Breaks):
    """Ends the process as a script does."""

    def breaks(self):
        sys.exit(4)


class Crashes(_Breaks):
    """Reads memory that is not its own."""

    def breaks(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class HasAStaleHandle(_Breaks):
    """A network file system that is gone."""

    def breaks(self):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "plates/plate0.h5ad")


class OfAnotherDtype(_Wrong):
    """Values are right, but wider than in the files."""

    def spoilt(self, minibatch):
        X = minibatch.X.to(torch.float64)
        return Minibatch({"X": X}, minibatch.obs, minibatch.rows)
