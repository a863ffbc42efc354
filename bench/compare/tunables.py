"""The fastest loader of the plates of ``--data`` on this machine, with its settings.

Tunes each loader that is installed, for ``--budget`` seconds. annbatch and TileDB-SOMA-ML need
their own copy of the same cells: ``--annbatch``, ``--soma``.

Settings have cellfeed's names where they mean the same, so that results can be compared:
``block_size`` rows are read together, and ``fetch_factor`` minibatches at a time. A loader is
imported when it is opened.
"""

import functools
import importlib
import importlib.util
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anndata
import h5py
import numpy as np
import pandas as pd
import torch
from anndata.experimental import AnnCollection
from bench._harness import Case, here, plates_of, say
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from cellfeed import CellfeedError, ColumnError, open_collection
from cellfeed_tuner import Configuration, Tunable, autotune
from cellfeed_tuner._constants import DEFAULT_BUDGET_SECONDS, DEFAULT_ENTROPY_FLOOR

WORKERS = 0, 1, 2, 4


def _peer(name: str) -> Any:
    """Import a module that may not be installed."""
    return importlib.import_module(name)


class OfPlates(Tunable):
    """A loader of ``.h5ad`` files, one after the other, or of a copy of them.

    Parameters
    ----------
    plates
        The files, in the order in which their cells are numbered.
    label
        The obs column that minibatches should mix.
    batch_size
        Cells of a minibatch.
    store
        The copy that the loader reads in place of the files, if any.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    needs_store: ClassVar[bool] = False

    def __init__(
        self, plates: Sequence[Path], label: str, *, batch_size: int = 64, store: Path | None = None
    ) -> None:
        self.plates, self.label, self.batch_size = tuple(plates), label, batch_size
        self.store = store
        self.files = self.plates if store is None else (store,)
        self.labels: dict[str, NDArray[np.intp]] = {label: _codes(plates, label)}

    @classmethod
    def missing(cls) -> list[str]:
        """Return which of its packages are not installed."""
        return [name for name in cls.needs if importlib.util.find_spec(name) is None]

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:
        """Return the labels that minibatches carry beside the expression."""
        _, labels = minibatch
        return {self.label: labels}

    def cells(self, **settings: Any) -> AnnCollection:
        """Return the cells of all files, which are read on access."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plates = [anndata.read_h5ad(path, backed="r") for path in self.plates]
            return AnnCollection(plates, join_vars="inner", harmonize_dtypes=False, **settings)


def _codes(plates: Sequence[Path], label: str) -> NDArray[np.intp]:
    """Return a code for the label of each cell, -1 where it is missing."""
    columns = []
    for path in plates:
        with h5py.File(path) as file:
            obs = anndata.io.read_elem(file["obs"])
        if label not in obs:
            msg = f"{path}: has no obs column {label!r}; it has {', '.join(obs)}"
            raise ColumnError(msg)
        columns.append(np.asarray(obs[label], dtype=object))
    codes: NDArray[np.intp] = pd.factorize(np.concatenate(columns))[0]
    return codes


class PlainDataLoader(OfPlates):
    """`torch.utils.data.DataLoader` over all cells, in minibatches of random rows."""

    parameters: Mapping[str, Sequence[int]] = {"num_workers": WORKERS}

    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader."""
        cells = _Cells(self.cells(), self.label)
        rows = BatchSampler(RandomSampler(range(len(cells))), self.batch_size, drop_last=True)
        n_workers = configuration.num_workers
        return DataLoader(cells, batch_size=None, sampler=rows, num_workers=n_workers)


class _Cells(torch.utils.data.Dataset[Any]):
    """Cells with their label, by rows."""

    def __init__(self, cells: AnnCollection, label: str) -> None:
        self._cells, self._label = cells, label

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, rows: Any) -> tuple[Any, Any]:
        taken = self._cells[rows]
        return _tensor(taken.X), taken.obs[self._label].to_numpy()


class AnnLoader(OfPlates):
    """anndata's own loader: every cell drawn at random."""

    parameters: Mapping[str, Sequence[int]] = {"num_workers": WORKERS}

    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader."""
        # AnnLoader does not take the texts of pandas 3.
        texts = {self.label: functools.partial(np.asarray, dtype=object)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader: Iterable[Any] = _peer("anndata.experimental").AnnLoader(
                self.cells(convert={"X": _tensor, "obs": texts}), batch_size=self.batch_size,
                shuffle=True, drop_last=True, num_workers=configuration.num_workers,
            )  # fmt: skip
            return loader

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:
        """Return the labels, and read the expression, which is read only on access."""
        _ = minibatch.X
        return {self.label: np.asarray(minibatch.obs[self.label])}


class ScDataset(OfPlates):
    """scDataset in shuffled blocks, as in its documentation for AnnData."""

    needs = ("scdataset",)
    parameters: Mapping[str, Sequence[int]] = {
        "block_size": (1, 4, 16, 64, 256),
        "fetch_factor": (1, 4, 16, 64, 256),
        "num_workers": WORKERS,
    }

    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader."""
        scdataset, n_workers = _peer("scdataset"), configuration.num_workers
        dataset = scdataset.scDataset(
            self.cells(), scdataset.BlockShuffling(configuration.block_size),
            batch_size=self.batch_size, fetch_factor=configuration.fetch_factor, drop_last=True,
            fetch_transform=functools.partial(_fetched, label=self.label), batch_callback=_batch,
        )  # fmt: skip
        # As its documentation recommends; without workers nothing may be given.
        ahead = configuration.fetch_factor + 1 if n_workers else None
        return DataLoader(dataset, batch_size=None, num_workers=n_workers, prefetch_factor=ahead)

    def planned_rows(
        self, configuration: Configuration, n_minibatches: int
    ) -> NDArray[np.int64] | None:
        """Return rows in the order of its strategy, shuffled once more in each fetch, as it does.

        The rows depend on the seed; how well they are mixed does not.
        """
        strategy = _peer("scdataset").BlockShuffling(configuration.block_size)
        n_rows, size = len(self.labels[self.label]), self.batch_size
        rows = np.asarray(strategy.get_indices(range(n_rows), seed=0), dtype=np.int64)
        fetch = configuration.fetch_factor
        n_fetches = min(rows.size // (fetch * size), -(-n_minibatches // fetch))
        if not n_fetches:
            return rows[: rows.size // size * size].reshape(-1, size)
        by_fetch = rows[: n_fetches * fetch * size].reshape(n_fetches, -1)
        shuffled = np.random.default_rng(0).permuted(by_fetch, axis=1)
        return shuffled.reshape(-1, size)[:n_minibatches]


def _fetched(cells: Any, label: str) -> tuple[Any, Any]:
    return cells.X, cells.obs[label].to_numpy()


def _batch(fetched: tuple[Any, Any], rows: Any) -> tuple[Any, Any]:
    X, labels = fetched
    return _tensor(X[rows]), labels[rows]


class Annbatch(OfPlates):
    """annbatch's `Loader` over a store of its own."""

    needs, needs_store = ("annbatch", "zarr"), True
    parameters: Mapping[str, Sequence[int]] = {
        "block_size": (16, 64, 256),  # its `chunk_size`
        "fetch_factor": (4, 16, 64, 256),  # its `preload_nchunks`, by the number of their cells
    }

    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader."""
        annbatch = _peer("annbatch")
        if importlib.util.find_spec("zarrs") is not None:
            _peer("zarr").config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        cells, size = self.batch_size * configuration.fetch_factor, configuration.block_size
        loader: Any = annbatch.Loader(
            batch_size=self.batch_size, chunk_size=size, preload_nchunks=max(1, cells // size),
            shuffle=True, to="torch", drop_last=True,
            rng=np.random.default_rng(random.randrange(1 << 30)),
        )  # fmt: skip

        def matrix_and_label(group: Any) -> anndata.AnnData:
            obs = anndata.io.read_elem(group["obs"])[[self.label]]
            return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]), obs=obs)

        with anndata.settings.override(remove_unused_categories=False):
            collection = annbatch.DatasetCollection(self.store)
            loader.use_collection(collection, load_adata=matrix_and_label)
        opened: Iterable[Any] = loader
        return opened

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:
        """Return the labels."""
        return {self.label: np.asarray(minibatch["obs"][self.label], dtype=object)}


class TileDBSOMAML(OfPlates):
    """TileDB-SOMA-ML over an experiment ingested from the files."""

    needs, needs_store = ("tiledbsoma", "tiledbsoma_ml"), True
    parameters: Mapping[str, Sequence[int]] = {
        "block_size": (16, 64, 256),  # its `shuffle_chunk_size`
        "fetch_factor": (16, 64, 256),  # its `io_batch_size`, in minibatches
    }

    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader."""
        soma_ml, rows = _peer("tiledbsoma_ml"), self.batch_size * configuration.fetch_factor
        experiment = _peer("tiledbsoma").Experiment.open(str(self.store))
        dataset = soma_ml.ExperimentDataset(
            experiment.axis_query(measurement_name="RNA"), layer_name="data",
            obs_column_names=[self.label], batch_size=self.batch_size, io_batch_size=rows,
            shuffle_chunk_size=min(configuration.block_size, rows), shuffle=True,
            seed=random.randrange(1 << 30), return_sparse_X=True,
        )  # fmt: skip
        loader: Iterable[Any] = soma_ml.experiment_dataloader(dataset)
        return loader

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:
        """Return the labels."""
        _, obs = minibatch
        return {self.label: obs[self.label].to_numpy()}


def _tensor(array: Any) -> Any:
    """Return a CSR matrix as a sparse tensor."""
    if not hasattr(array, "indptr"):
        return torch.from_numpy(np.asarray(array))
    indptr, indices, data = map(torch.from_numpy, (array.indptr, array.indices, array.data))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            indptr, indices, data, size=array.shape, check_invariants=False
        )


# None is cellfeed's own.
LOADERS: dict[str, type[OfPlates] | None] = {
    "cellfeed": None,
    "scDataset": ScDataset,
    "annbatch": Annbatch,
    "TileDB-SOMA-ML": TileDBSOMAML,
    "AnnLoader": AnnLoader,
    "DataLoader": PlainDataLoader,
}


def tuned(seed: int, name: str, paths: Sequence[Path], store: str, options: Any) -> dict[str, Any]:
    """Tune a loader, print its best settings, and return their figures, None if there are none."""
    kind, given = LOADERS[name], {"budget": options.budget, "entropy_floor": options.entropy_floor}
    figures = dict[str, Any].fromkeys(
        ("cells/s", "low", "high", "% of random's entropy", "peak MB")
    )
    try:
        if kind is None:
            collection = open_collection([*map(str, paths)], obs=[options.label])
            given |= {"label": options.label, "batch_size": options.batch}
            result = autotune(collection, **given)
        else:
            own = Path(store) if store else None
            loader = kind(paths, options.label, batch_size=options.batch, store=own)
            result = autotune(loader, **given)
    except CellfeedError as error:
        say(f"{name}: {error}")
        return figures
    chosen, known = result.recommended, result.chosen
    if chosen is None or known is None:
        say(f"{name}: none is feasible{f': {result.nearest.problem}' if result.nearest else ''}")
        return figures
    say(f"{name}: {chosen.settings}")
    if (speed := chosen.cells_per_second) is not None:
        figures |= {"cells/s": speed.value, "low": speed.low, "high": speed.high}
    figures["% of random's entropy"] = 100 * known.share_of_random
    return figures | {"peak MB": (chosen.peak_memory_bytes or 0) / 1e6}


def cases(options: Any) -> Iterator[Case]:
    stores = {"annbatch": options.annbatch, "TileDB-SOMA-ML": options.soma}
    paths, ways = plates_of(options), {}
    for name in options.loaders.split(",") if options.loaders else LOADERS:
        store, kind = stores.get(name, ""), LOADERS[name]
        if kind is not None and kind.missing():
            packages = " ".join(kind.missing()).replace("_", "-")
            say(f"{name} is left out, not installed: pip install {packages}")
        elif kind is not None and kind.needs_store and not store:
            say(f"{name} is left out, it needs its own copy of the cells")
        else:
            ways[name] = here(tuned, name=name, paths=paths, store=store, options=options)
    if ways:
        yield Case(ways, options.label)


OPTIONS: dict[str, Any] = {
    "cells": 28_000, "rounds": 1, "label": "plate", "batch": 64, "loaders": "", "annbatch": "",
    "soma": "", "budget": DEFAULT_BUDGET_SECONDS, "entropy_floor": DEFAULT_ENTROPY_FLOOR,
    "n_ratios": 0,
}  # fmt: skip
