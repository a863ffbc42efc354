"""A data module for scvi-tools: its models train on a collection that need not fit in memory."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import qc_metrics, sampling
from cellfeed.collection import Collection, open_collection
from cellfeed.dataset import CellDataset, Statistics
from cellfeed.extending import (
    ColumnError,
    FormatError,
    ParameterError,
    StateError,
    ad,
    pd,
    require_list,
    sp,
    torch,
)
from cellfeed.rows import CategoricalColumn
from cellfeed.sampling import BlockShuffling, Streaming

if TYPE_CHECKING:
    from anndata import AnnData

    from cellfeed import Minibatch
    from cellfeed.dataset import MinibatchLoader

_Base: Any = object  # without scvi-tools, which is said where a data module is made
with contextlib.suppress(ImportError):
    _Base = importlib.import_module("lightning.pytorch").LightningDataModule

__all__ = ["ScviDataModule"]

_BATCH_SIZE, _BLOCK_SIZE = 128, 16
_N_INFERRED, _INFERRED_TOGETHER = 1024, 2  # cells of a minibatch where nothing is trained
_N_CHECKED = 100  # cells by which scvi-tools tells whether values are counts
_N_OF_CATEGORY = 3  # with fewer cells of a category, scvi-tools warns
_DISCRETE = ("batch", "labels", "extra_categorical_covs", "ind_x")  # others are float32 there
_KEYS = ("batch_key", "labels_key", "sample_key")
_OBSERVED = "use_observed_lib_size"
_OF_READING = ("read_options", "transform_threads")
_NOT_TAKEN = ("as_torch", "batch_transform", "dense", "dtype", "fetch_transform", "transform")


class ScviDataModule(_Base):  # type: ignore[misc]
    """Minibatches of a collection for models of scvi-tools, on which they train as on an AnnData.

    ``SCVI(registry=data.registry).train(datamodule=data)`` trains a model,
    ``get_latent_representation(dataloader=data.inference_dataloader())`` and the other methods with
    a ``dataloader`` apply it to all cells, in the order of the collection. The registry is that of
    the model's ``setup_anndata``, so models are saved and loaded without the data, and a model that
    was trained on files can be applied to an AnnData in memory.

    With ``unlabeled_category``, each step gets a minibatch of all cells and one of labelled cells,
    as in `scvi.dataloaders.SemiSupervisedDataLoader`; labelled cells come again, in a new order,
    when all of them were seen.

    Parameters
    ----------
    collection
        A `Collection`, opened with the columns and the layer that are named here; or anything that
        `open_collection` opens, such as ``"plates/*.h5ad"``, which is then opened with these.
    model
        The class of the model. If None, `scvi.model.SCANVI` with ``unlabeled_category``, and else
        `scvi.model.SCVI`.
    layer
        Layer with raw counts; ``X`` if None.
    batch_key, labels_key, size_factor_key, categorical_covariate_keys, continuous_covariate_keys
        Names of obs columns, as in ``setup_anndata`` of the model.
    unlabeled_category
        Label of unlabelled cells. Cells without a label count as unlabelled, too.
    sample_key
        Name of an obs column, as in ``setup_anndata`` of `scvi.external.MRVI`, which is called
        ``TorchMRVI`` before scvi-tools 1.5.
    split
        Rows to train on, and rows to validate on: ``random_split(collection, [0.9, 0.1], seed=0)``.
        If None, training visits all cells and nothing is validated.
    strategy
        In which order rows are visited; shuffled blocks of 16 if None.
    autotune
        Path of an ``autotune.json``, or a result: its settings are used; see
        `CellDataset.from_autotune`.
    batch_size
        Number of cells in a minibatch, at least two, since layers with batch normalisation cannot
        train on one. If None, that of ``autotune``, else 128 as in scvi-tools.
    num_workers
        Number of worker processes. If None, that of ``autotune``, else 0: the threads of this
        process read ahead.
    load_sparse_tensor
        Whether minibatches stay sparse until they are on the device of the training, which saves
        time if that is a GPU.
    pin_memory
        Whether minibatches are in pinned memory, from which a GPU copies faster.
    **parameters
        Other parameters of `CellDataset`, such as ``fetch_factor``. The ``seed`` is
        ``scvi.settings.seed`` unless it is given. If one cell would be left for the last minibatch,
        ``drop_last`` is true.

    Raises
    ------
    ImportError
        scvi-tools is not installed.
    ColumnError
        A column is missing, was not opened, or has no value for a cell to be read.
    ParameterError
        The model does not take one of the keys, registers data that do not come from X, a layer or
        obs, a parameter is invalid, or a rank has a single cell to train on.

    Warns
    -----
    UserWarning
        The values are no counts (by scvi-tools).
    """

    def __init__(
        self,
        collection: Any,
        model: type[Any] | None = None,
        *,
        layer: str | None = None,
        batch_key: str | None = None,
        labels_key: str | None = None,
        unlabeled_category: str | None = None,
        size_factor_key: str | None = None,
        categorical_covariate_keys: Sequence[str] | None = None,
        continuous_covariate_keys: Sequence[str] | None = None,
        sample_key: str | None = None,
        split: Sequence[ArrayLike] | None = None,
        strategy: sampling.SamplingStrategy | None = None,
        autotune: Any = None,
        batch_size: int | None = None,
        num_workers: int | None = None,
        load_sparse_tensor: bool = False,
        pin_memory: bool = False,
        **parameters: Any,
    ) -> None:
        scvi = _import_scvi()
        super().__init__()
        for name in parameters:
            if name in _NOT_TAKEN:
                msg = f"`{name}` is chosen for scvi-tools; leave it out"
                raise ParameterError(msg)
        setup: dict[str, Any] = {
            "layer": layer,
            "batch_key": batch_key,
            "labels_key": labels_key,
            "unlabeled_category": unlabeled_category,
            "size_factor_key": size_factor_key,
            "categorical_covariate_keys": categorical_covariate_keys,
            "continuous_covariate_keys": continuous_covariate_keys,
            "sample_key": sample_key,
        }
        for name in ("categorical_covariate_keys", "continuous_covariate_keys"):
            if setup[name] is not None:
                require_list(name, "names", setup[name])
                setup[name] = [*setup[name]] or None
        setup = {name: value for name, value in setup.items() if value is not None}
        semi_supervised = unlabeled_category is not None
        self._model = model or (scvi.model.SCANVI if semi_supervised else scvi.model.SCVI)
        _require_taken(self._model, setup)
        self._setup: dict[str, Any] = setup
        self._element = f"layers/{setup['layer']}" if "layer" in setup else "X"
        self.collection = _opened(collection, self._element, setup)
        template = self._template()
        self._model.setup_anndata(template, **setup)
        get_manager = self._model._get_most_recent_anndata_manager  # noqa: SLF001 - no other way
        self._manager = get_manager(template, required=True)
        self._tensors = _Tensors(self._element, self._fields())

        self._parameters = {"seed": scvi.settings.seed} | parameters
        self._load_sparse_tensor = load_sparse_tensor
        self._options: dict[str, Any] = {"pin_memory": True} if pin_memory else {}
        self._autotune, self._batch_size, self._num_workers = autotune, batch_size, num_workers
        self._train_rows, self._val_rows = _two_parts(split)
        self.dataset = self._dataset_to_train(strategy, self._train_rows)
        self._labelled_train: CellDataset | None = None
        self._loader: Any = self._loader_of(self.dataset, is_persistent=True)
        rows = self._labelled(getattr(self.dataset.strategy, "indices", None))
        if rows is not None:
            self._labelled_train = self._dataset_to_train(None, rows)
            labelled = self._loader_of(self._labelled_train, is_persistent=True)
            self._loader = _WithLabelled(self._loader, labelled)

    # What scvi-tools asks of a data module.

    @property
    def registry(self) -> dict[str, Any]:
        """The registry of the model's ``setup_anndata``, for ``SCVI(registry=...)``."""
        registry: dict[str, Any] = deepcopy(self._manager.registry)
        fields = registry["field_registries"]
        for each in fields.values():
            if "n_obs" in each["state_registry"]:
                each["state_registry"]["n_obs"] = len(self.collection)
                each["summary_stats"]["n_cells"] = len(self.collection)
        if "sample" in fields:  # where MRVI looks for it
            codes, n = self._codes("sample"), len(self._mapping("sample"))
            counts = torch.from_numpy(np.bincount(codes[codes >= 0], minlength=n))
            fields["sample"]["n_obs_per_sample"] = {"n_obs_per_sample": counts.float()}
        return registry

    @property
    def n_obs(self) -> int:
        """Number of cells of the collection."""
        return len(self.collection)

    @property
    def n_train(self) -> int:
        """Number of cells that an epoch of the training visits."""
        return self.dataset.strategy.n_positions(len(self.collection))

    @property
    def n_val(self) -> int:
        """Number of cells to validate on."""
        return 0 if self._val_rows is None else len(self._val_rows)

    @property
    def labels(self) -> pd.Categorical:
        """The label of each cell, for SCANVI.

        If no cell is unlabelled, one entry with the unlabelled category follows: SCANVI looks for
        it there, and would otherwise count it among the classes that it predicts.
        """
        codes, unlabelled = self._codes("labels"), self._unlabelled
        if unlabelled is not None and not np.any(codes == unlabelled):
            codes = np.append(codes, codes.dtype.type(unlabelled))
        return pd.Categorical.from_codes(codes, categories=pd.Index(self._mapping("labels")))

    # Loaders.

    def train_dataloader(self) -> Any:
        """Return the loader of the training, the same each time."""
        return self._loader

    def val_dataloader(self) -> Any:
        """Return a loader of the cells to validate on; an empty list if there are none."""
        if not self.n_val:
            return []
        batch_size, n = self.dataset.batch_size, self.dataset.fetch_factor
        loader = self._loader_of(self._dataset(Streaming(self._val_rows), batch_size, n))
        rows = self._labelled(self._val_rows)
        if rows is None:
            return loader
        return _WithLabelled(loader, self._loader_of(self._dataset(Streaming(rows), batch_size, n)))

    def inference_dataloader(
        self, rows: ArrayLike | None = None, *, batch_size: int = _N_INFERRED
    ) -> MinibatchLoader:
        """Return a loader for methods of a model that take a ``dataloader``.

        What they return is in the order of the collection. On several ranks, each of them infers
        all cells.

        Parameters
        ----------
        rows
            The cells, ascending; all of them if None.
        batch_size
            Number of cells in a minibatch.

        Raises
        ------
        ParameterError
            ``rows`` are not ascending.
        ColumnError
            A cell has no value in one of the columns.
        """
        if rows is not None and np.any(np.diff(np.asarray(rows)) <= 0):
            msg = "`rows` must be ascending, since results come in the order of the collection"
            raise ParameterError(msg)
        strategy = Streaming(rows)
        return self._loader_of(
            self._dataset(strategy, batch_size, _INFERRED_TOGETHER, rank=0, world_size=1)
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Make sparse tensors dense, on the device of the training."""
        if isinstance(batch, tuple):
            return tuple(self.on_after_batch_transfer(each, dataloader_idx) for each in batch)
        return {
            name: each if each.layout is torch.strided else each.to_dense()
            for name, each in batch.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training; see `CellDataset.state_dict`."""
        return {"train": self._loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state: training goes on with the minibatch that would have followed.

        Raises
        ------
        StateError
            The state is damaged, or of other cells, parameters or another seed.
        """
        self._loader.load_state_dict(_part_of(state_dict, "train"))

    def statistics(self) -> Statistics:
        """Return counts and times of the training; see `CellDataset.statistics`.

        ``waiting_share`` is the share of its time that the training waited for minibatches.
        """
        every = self.dataset.statistics()
        if self._labelled_train is None:
            return every
        labelled = self._labelled_train.statistics()
        both, waited = every + labelled, labelled.waiting
        return replace(both, training=every.training - waited)

    def __reduce__(self) -> Any:
        # SCANVI is saved with the data module that it was made with, and loaded with what it then
        # asks of that one.
        labels = None if self._unlabelled is None else self._mapping("labels")
        state = {"registry": {"setup_method_name": "setup_anndata"}, "labels": labels}
        return SimpleNamespace, (), state

    # Models.

    def new_model(self, **parameters: Any) -> Any:
        """Return a new model of the class of this data module.

        This also makes models whose class takes no registry, such as `scvi.model.LinearSCVI`, and
        those with ``use_observed_lib_size=False``, for which all cells are read once: the prior of
        the log library size has the mean and variance of each batch.

        Parameters
        ----------
        **parameters
            Parameters of the class, such as ``n_latent``.
        """
        takes = inspect.signature(self._model).parameters
        is_observed = parameters.get(
            _OBSERVED, takes[_OBSERVED].default if _OBSERVED in takes else 1
        )
        if "datamodule" in takes:
            parameters["datamodule"] = self
        if "registry" in takes and is_observed:
            return self._model(registry=self.registry, **parameters)
        parameters.pop("datamodule", None)
        model = _without_cells(self._model(self._manager.adata, **parameters), self.registry)
        if not is_observed and "size_factor_key" not in self._setup:
            means, variances = map(torch.from_numpy, self._log_library_sizes())
            model.module.library_log_means.copy_(means)
            model.module.library_log_vars.copy_(variances)
        return model

    def _log_library_sizes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and variance of the log counts of cells, each of shape (1, n_batches).

        As in scvi-tools, logarithms are float32, cells without counts have 0, and batches without
        cells 0 and 1.
        """
        totals = qc_metrics(self.collection, element=self._element)[0]["total_counts"]
        logs = np.log(totals.where(totals > 0, 1.0).to_numpy(np.float32))
        batches = self._codes("batch")
        priors = np.tile([[0.0], [1.0]], len(self._mapping("batch")))
        for batch in np.unique(batches):
            of_batch = logs[batches == batch]
            priors[:, batch] = of_batch.mean(), of_batch.var()
        return priors[:1], priors[1:]

    def anndata(self, rows: ArrayLike | slice, *, obs: Sequence[str] = ()) -> AnnData:
        """Read cells into memory, for methods of a model that take an ``adata``.

        Parameters
        ----------
        rows
            The cells, in this order.
        obs
            Names of further obs columns.

        Returns
        -------
        The counts, with the names of genes and cells and the obs columns of the data module, whose
        categories are those that these cells have.
        """
        columns = self.collection.read_obs([*dict.fromkeys([*_columns_of(self._setup), *obs])])
        cells = self.collection[rows]  # type: ignore[index]
        frame = {
            name: pd.Categorical.from_codes(
                column.codes[cells.rows], pd.Index(column.categories)
            ).remove_unused_categories()
            if isinstance(column, CategoricalColumn)
            else column.values[cells.rows]
            for name, column in columns.items()
        }
        names = pd.Index(self.collection.obs_names(cells.rows))
        return self._anndata(cells[self._element], pd.DataFrame(frame, index=names))

    # The registry, and the columns that it is made of.

    def _anndata(self, counts: Any, obs: pd.DataFrame) -> AnnData:
        counts = sp.csr_matrix(counts)  # no sparse array
        var = pd.DataFrame(index=pd.Index(self.collection.elements[self._element].column_names))
        if "layer" not in self._setup:
            return ad.AnnData(counts, obs, var)
        return ad.AnnData(obs=obs, var=var, layers={self._setup["layer"]: counts})

    def _template(self) -> AnnData:
        """Return a few cells that have all categories, for ``setup_anndata``.

        The counts are those of the first cells, by which scvi-tools tells whether they are counts.
        """
        values = dict[str, Any]()
        for name in _columns_of(self._setup):
            column = self.collection.obs[name]
            if isinstance(column, CategoricalColumn):
                values[name] = pd.CategoricalIndex(column.categories, column.categories)
            else:
                numbers = _numbers_in(column.values)
                values[name] = numbers[:1] if name in _numbers_of(self._setup) else numbers
            if not len(values[name]):
                msg = f"obs column {name!r} has no value for any cell; leave it out"
                raise ColumnError(msg)
        # Each value of each column comes several times.
        n = max(_N_CHECKED, _N_OF_CATEGORY * max(map(len, values.values()), default=0))
        obs = pd.DataFrame(
            {name: each.take(np.arange(n) % len(each)) for name, each in values.items()},
            index=pd.Index(map(str, range(n))),
        )
        first = self.collection[: min(_N_CHECKED, len(self.collection))][self._element]
        if getattr(first, "ndim", None) != 2:  # noqa: PLR2004 - cells x genes
            msg = f"{self._element} is not a matrix of cells x genes, which scvi-tools needs"
            raise FormatError(msg)
        counts: Any = sp.csr_matrix(first)
        counts.resize((n, counts.shape[1]))
        return self._anndata(counts, obs)

    def _fields(self) -> dict[str, tuple[_Column, ...]]:
        """Return what each field of the registry is made of, except for the counts."""
        fields = dict[str, tuple[_Column, ...]]()
        for key, field in self._manager.registry["field_registries"].items():
            where, state = field["data_registry"], field["state_registry"]
            if not where or "n_obs" in state:  # an empty field, and the counts
                continue
            match where["attr_name"], state:
                case "obs", {"categorical_mapping": mapping, "original_key": name}:
                    fields[key] = (self._categorical(name, mapping, self._unlabelled_in(state)),)
                case "obsm", {"field_keys": names, "mappings": mappings}:
                    fields[key] = tuple(self._categorical(each, mappings[each]) for each in names)
                case "obsm", {"columns": names}:
                    fields[key] = tuple(_Column(name) for name in names)
                case "obs", {}:
                    name = where["attr_key"]
                    fields[key] = (_Column(_ROW if name == "_indices" else name),)
                case _:
                    msg = (
                        f"{self._model.__name__} takes {key!r} from {where['attr_name']}, but a "
                        "data module has counts and obs columns alone; use another model"
                    )
                    raise ParameterError(msg)
        return fields

    def _categorical(
        self, name: str, mapping: NDArray[Any], of_missing: int | None = None
    ) -> _Column:
        if name not in self.collection.obs:  # no key was given
            return _Column(None, np.array([of_missing or 0]))
        column = self.collection.obs[name]
        values = (
            column.categories
            if isinstance(column, CategoricalColumn)
            else _numbers_in(column.values)
        )
        codes = pd.Index(mapping).get_indexer(pd.Index(values))
        codes = np.append(codes, -1 if of_missing is None else of_missing)
        dtype = np.min_scalar_type(-max(1, len(mapping)))
        return _Column(
            name, codes.astype(dtype), None if isinstance(column, CategoricalColumn) else values
        )

    @staticmethod
    def _unlabelled_in(state: Mapping[str, Any]) -> int | None:
        if "unlabeled_category" not in state:
            return None
        mapping = [*state["categorical_mapping"]]
        return mapping.index(state["unlabeled_category"])

    @property
    def _unlabelled(self) -> int | None:
        """The code of unlabelled cells; None if the model does not distinguish them."""
        labels = self._manager.registry["field_registries"].get("labels")
        return None if labels is None else self._unlabelled_in(labels["state_registry"])

    def _mapping(self, key: str) -> NDArray[Any]:
        """Return the categories of a field, by code."""
        state = self._manager.registry["field_registries"][key]["state_registry"]
        mapping: NDArray[Any] = state["categorical_mapping"]
        return mapping

    def _codes(self, key: str, rows: Any = None) -> NDArray[np.signedinteger]:
        """Return the code of each cell in a field of one column, or of some cells."""
        (column,) = self._tensors.fields[key]
        codes: NDArray[np.signedinteger] = column.of(*self._stored(column, rows))
        return codes

    def _stored(self, column: _Column, rows: Any) -> tuple[NDArray[Any], int]:
        """Return the stored values of a column for some cells, and their number."""
        n = len(self.collection) if rows is None else len(rows)
        if column.name is None or column.name == _ROW:
            return np.empty(0), n
        values = self.collection.obs[column.name].values
        return values if rows is None else values[rows], n

    def _labelled(self, rows: Any) -> NDArray[np.int64] | None:
        """Return which of some cells have a label; None if this is not distinguished, or none."""
        if self._unlabelled is None:
            return None
        places = np.flatnonzero(self._codes("labels", rows) != self._unlabelled)
        found: NDArray[np.int64] = places if rows is None else np.asarray(rows)[places]
        return found if found.size else None

    # Datasets and loaders.

    def _dataset_to_train(
        self, strategy: sampling.SamplingStrategy | None, rows: Any
    ) -> CellDataset:
        if rows is not None and strategy is not None:
            if getattr(strategy, "indices", None) is not None:
                msg = "`split` and a strategy with `indices` cannot be combined; give one of them"
                raise ParameterError(msg)
            strategy = replace(strategy, indices=rows)  # type: ignore[type-var]
            rows = None
        dataset = self._made(strategy, rows)
        if dataset.batch_size == 1:
            msg = "`batch_size >= 2` must hold, but got batch_size=1"
            raise ParameterError(f"{msg}: layers of scvi-tools normalise over a minibatch")
        if _n_to_train(dataset) == 1:
            msg = "a rank has a single cell to train on, or a single one with a label, but layers"
            raise ParameterError(f"{msg} of scvi-tools normalise over a minibatch; give more cells")
        if _ends_with_one(dataset):
            dataset = self._made(strategy, rows, drop_last=True)
        self._require_values(getattr(dataset.strategy, "indices", None))
        return dataset

    def _made(
        self, strategy: sampling.SamplingStrategy | None, rows: Any, **options: Any
    ) -> CellDataset:
        parameters = self._parameters | self._delivery | options
        if self._autotune is not None:
            if self._batch_size is not None:
                parameters["batch_size"] = self._batch_size
            return CellDataset.from_autotune(
                self.collection, self._autotune, strategy=strategy, indices=rows, **parameters
            )
        strategy = strategy or BlockShuffling(_BLOCK_SIZE, rows)
        batch_size = _BATCH_SIZE if self._batch_size is None else self._batch_size
        return CellDataset(self.collection, strategy, batch_size, **parameters)

    def _dataset(
        self, strategy: Streaming, batch_size: int, fetch_factor: int, **ranks: Any
    ) -> CellDataset:
        self._require_values(strategy.indices)
        reading = {name: self._parameters[name] for name in _OF_READING if name in self._parameters}
        return CellDataset(
            self.collection,
            strategy,
            batch_size,
            fetch_factor,
            **self._delivery,
            **reading,
            **ranks,
        )

    @property
    def _delivery(self) -> dict[str, Any]:
        """Parameters of all datasets: how minibatches are delivered."""
        return {
            "dense": not self._load_sparse_tensor,
            "dtype": {self._element: "float32"},
            "batch_transform": self._tensors,
        }

    def _loader_of(self, dataset: CellDataset, *, is_persistent: bool = False) -> MinibatchLoader:
        n = self.dataset.num_workers if self._num_workers is None else self._num_workers
        options = self._options | ({"persistent_workers": True} if n and is_persistent else {})
        return dataset.loader(n, **options)

    def _require_values(self, rows: Any) -> None:
        """Check that cells have a value in all columns.

        Raises
        ------
        ColumnError
            One has not.
        """
        for column in {
            each.name: each for of in self._tensors.fields.values() for each in of
        }.values():
            values, n = self._stored(column, rows)
            found = column.of(values, n)
            lacking = np.flatnonzero(found < 0 if column.codes is not None else np.isnan(found))
            if lacking.size:
                row = lacking[0] if rows is None else np.asarray(rows)[lacking[0]]
                msg = (
                    f"obs column {column.name!r} has no value for {lacking.size:,} of {n:,} cells, "
                    f"such as row {row:,}; leave these cells out with `split` or `rows`"
                )
                raise ColumnError(msg)


_ROW = "_indices"  # not a column: the row of each cell


@dataclass(frozen=True, slots=True)
class _Column:
    """How an obs column becomes what scvi-tools is given.

    Parameters
    ----------
    name
        Name of the column; None if all cells have the same code.
    codes
        Code of each category in the registry, and of missing values; None for numbers.
    categories
        The categories of a column of numbers, ascending; None if the column has codes.
    """

    name: str | None
    codes: NDArray[np.signedinteger] | None = None
    categories: NDArray[Any] | None = None

    def of(self, values: NDArray[Any], n: int) -> NDArray[Any]:
        """Return codes or numbers for the stored values of ``n`` cells."""
        if self.codes is None:
            return values
        if self.name is None:
            return np.full(n, self.codes[0])
        if self.categories is not None:
            values = np.searchsorted(self.categories, values)  # NaN comes last
        coded: NDArray[Any] = self.codes[values]
        return coded


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A ``batch_transform``: minibatches as scvi-tools' own loaders make them.

    Parameters
    ----------
    element
        The counts.
    fields
        The columns of each field of the registry.
    """

    element: str
    fields: Mapping[str, tuple[_Column, ...]]

    def __call__(self, minibatch: Minibatch) -> dict[str, torch.Tensor]:
        tensors = {"X": minibatch[self.element]}
        n = len(minibatch)
        for key, columns in self.fields.items():
            dtype = np.int64 if key in _DISCRETE else np.float32
            values = np.empty((n, len(columns)), dtype)
            for k, column in enumerate(columns):
                stored = (
                    minibatch.rows if column.name == _ROW else minibatch.obs.get(column.name or "")
                )
                values[:, k] = column.of(np.empty(0) if stored is None else stored.numpy(), n)
            tensors[key] = torch.from_numpy(values)
        return tensors


class _WithLabelled:
    """A loader of pairs: a minibatch of all cells, and one of labelled cells, again and again.

    Parameters
    ----------
    every, labelled
        Their loaders.
    """

    def __init__(self, every: MinibatchLoader, labelled: MinibatchLoader) -> None:
        self._every, self._labelled = every, labelled
        self._minibatches: Iterator[Any] = iter(())
        self.sampler = every.sampler  # whose epoch trainers set

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for every in self._every:
            labelled = next(self._minibatches, None)
            if labelled is None:
                self._minibatches = iter(self._labelled)
                labelled = next(self._minibatches)
            yield every, labelled

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of both."""
        return {"all": self._every.state_dict(), "labelled": self._labelled.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume both from a state."""
        self._minibatches = iter(())
        self._every.load_state_dict(_part_of(state, "all"))
        self._labelled.load_state_dict(_part_of(state, "labelled"))


def _part_of(state: Any, name: str) -> Any:
    if not isinstance(state, Mapping) or name not in state:
        msg = f"the state is damaged: it has no {name!r}; load one of a ScviDataModule"
        raise StateError(msg)
    return state[name]


# Arguments.


def _import_scvi() -> Any:
    try:
        import scvi  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = (
            "`ScviDataModule` needs scvi-tools, which is not installed; install it with "
            "`pip install 'cellfeed[scvi]'`"
        )
        raise ImportError(msg, name="scvi") from error
    return scvi


def _columns_of(setup: Mapping[str, Any]) -> list[str]:
    """Return the names of the obs columns that are named, each once."""
    named = [setup[key] for key in _KEYS if key in setup]
    named += setup.get("categorical_covariate_keys", [])
    return [*dict.fromkeys([*named, *_numbers_of(setup)])]


def _numbers_of(setup: Mapping[str, Any]) -> list[str]:
    """Return the names of the obs columns whose numbers are used as they are."""
    named = [setup["size_factor_key"]] if "size_factor_key" in setup else []
    return [*named, *setup.get("continuous_covariate_keys", [])]


def _numbers_in(values: NDArray[Any]) -> NDArray[Any]:
    found = np.unique(values)
    return found[~np.isnan(found)] if found.dtype.kind == "f" else found


def _two_parts(split: Any) -> tuple[Any, Any]:
    """Return the rows to train on and those to validate on; None if they are not given."""
    if split is None:
        return None, None
    parts = [*split]
    if not parts or not all(np.ndim(each) == 1 for each in parts):
        msg = "`split` must be arrays of rows, as those of `random_split(collection, [0.9, 0.1])`"
        raise ParameterError(msg)
    return parts[0], parts[1] if len(parts) > 1 else None


def _opened(collection: Any, element: str, setup: Mapping[str, Any]) -> Collection:
    """Return a collection that has the counts and the columns of a setup.

    Raises
    ------
    ColumnError
        A column is absent.
    ParameterError
        The counts are absent.
    """
    columns = _columns_of(setup)
    if not isinstance(collection, Collection):
        return open_collection(collection, obs=columns, elements=[element])
    for name in columns:
        collection.obs[name]  # which is an error if it was not opened
    if element not in collection.elements:
        msg = f"the collection was opened without {element!r}"
        raise ParameterError(f"{msg}; name it in `open_collection(..., elements=[{element!r}])`")
    return collection


# Cells and models of scvi-tools.


def _without_cells(model: Any, registry: Mapping[str, Any]) -> Any:
    """Return a model without its cells, so that methods must be given some; it keeps the genes."""
    model._adata, model._adata_manager = model.adata[:0].copy(), None  # noqa: SLF001 - no other way
    model.registry_ = registry
    return model


def _require_taken(model: Any, setup: Mapping[str, Any]) -> None:
    """Check the keys that a model takes.

    Raises
    ------
    ParameterError
        It does not take one of them, or needs another.
    """
    takes = inspect.signature(model.setup_anndata).parameters
    needs = [
        name
        for name, each in takes.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    said = [
        f"takes no `{name}`; leave it out, or give `model=`" for name in setup if name not in takes
    ]
    lacking = [name for name in needs if name not in ("adata", *setup)]
    said += [f"needs `{name}`; give it, or use another model" for name in lacking]
    if said:
        msg = f"{model.__name__} {said[0]}"
        raise ParameterError(msg)


def _n_to_train(dataset: CellDataset) -> int:
    """Return how many cells an epoch visits on a rank."""
    return -(-dataset.strategy.n_positions(len(dataset.collection)) // dataset.world_size)


def _ends_with_one(dataset: CellDataset) -> bool:
    """Return whether the last minibatch of a rank has one cell, too few for normalisation."""
    return _n_to_train(dataset) % dataset.batch_size == 1
