"""A data module for scvi-tools: its models train on a collection that need not fit in memory."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

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
from cellfeed.rows import CategoricalColumn, ObsColumn
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
        try:
            import scvi  # noqa: PLC0415 - an extra
        except ImportError as error:
            msg = (
                "`ScviDataModule` needs scvi-tools, which is not installed; install it with "
                "`pip install 'cellfeed[scvi]'`"
            )
            raise ImportError(msg, name="scvi") from error
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
        self._numbers = [size_factor_key, *setup.get("continuous_covariate_keys", [])]
        named = [batch_key, labels_key, sample_key, *setup.get("categorical_covariate_keys", [])]
        self._columns = [*filter(None, dict.fromkeys([*named, *self._numbers]))]
        if not isinstance(collection, Collection):
            collection = open_collection(collection, obs=self._columns, elements=[self._element])
        self.collection: Collection = collection
        template = self._template()
        self._model.setup_anndata(template, **setup)
        get_manager = self._model._get_most_recent_anndata_manager  # noqa: SLF001 - no other way
        self._manager = get_manager(template, required=True)
        self._tensors = _Tensors(self._element, self._fields())

        self._parameters = {"seed": scvi.settings.seed} | parameters
        self._delivery: dict[str, Any] = {  # of all datasets
            "dense": not load_sparse_tensor,
            "dtype": {self._element: "float32"},
            "batch_transform": self._tensors,
        }
        self._pin_memory = pin_memory
        self._autotune, self._batch_size, self._num_workers = autotune, batch_size, num_workers
        parts: list[Any] = [] if split is None else [*split]
        if split is not None and not (parts and all(np.ndim(each) == 1 for each in parts)):
            msg = "`split` must be arrays of rows, as those of `random_split(collection, [0.9, "
            raise ParameterError(f"{msg}0.1])`")
        self._val_rows: Any = parts[1] if len(parts) > 1 else None
        self.dataset = self._dataset_to_train(strategy, parts[0] if parts else None)
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
            codes, n = self._codes("sample"), len(self._state("sample")["categorical_mapping"])
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
        return pd.Categorical.from_codes(
            codes, categories=pd.Index(self._state("labels")["categorical_mapping"])
        )

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
        labels = None if self._unlabelled is None else self._state("labels")["categorical_mapping"]
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
        default = takes[_OBSERVED].default if _OBSERVED in takes else True
        is_observed = parameters.get(_OBSERVED, default)
        if "registry" in takes and is_observed:
            if "datamodule" in takes:
                parameters["datamodule"] = self
            return self._model(registry=self.registry, **parameters)
        model = self._model(self._manager.adata, **parameters)
        # Without its cells, so that methods must be given some; it keeps the genes.
        model._adata, model._adata_manager = model.adata[:0].copy(), None  # noqa: SLF001 - no other way
        model.registry_ = self.registry
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
        priors = np.tile([[0.0], [1.0]], len(self._state("batch")["categorical_mapping"]))
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
        columns = self.collection.read_obs([*dict.fromkeys([*self._columns, *obs])])
        cells = self.collection[rows]  # type: ignore[index]
        frame = {
            name: _categorical(column)[cells.rows].remove_unused_categories()
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
        if self._element not in self.collection.elements:
            msg = f"the collection was opened without {self._element!r}; name it in"
            msg = f"{msg} `open_collection(..., elements=[{self._element!r}])`"
            raise ParameterError(msg)
        values = dict[str, pd.Index]()
        for name in self._columns:
            column = self.collection.obs[name]
            if name in self._numbers:
                numbers = _numbers(name, column)
                values[name] = pd.Index(numbers[~np.isnan(numbers)][:1])
            else:
                categories = _categorical(column).categories
                values[name] = pd.CategoricalIndex(categories, categories)
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

    def _fields(self) -> dict[str, _Columns]:
        """Return the columns of each field of the registry, except for the counts."""
        obs, fields = self.collection.obs, dict[str, _Columns]()
        for key, field in self._manager.registry["field_registries"].items():
            where, state = field["data_registry"], field["state_registry"]
            if not where or "n_obs" in state:  # an empty field, and the counts
                continue
            match where["attr_name"], state:
                case "obs", {"categorical_mapping": mapping, "original_key": name}:
                    fields[key] = [(name, self._coded(name, mapping))]
                case "obsm", {"field_keys": names, "mappings": mappings}:
                    fields[key] = [(name, self._coded(name, mappings[name])) for name in names]
                case "obsm", {"columns": names}:
                    fields[key] = [(name, _numbers(name, obs[name])) for name in names]
                case "obs", {}:
                    name = where["attr_key"]
                    is_row = name == "_indices"  # not a column: the row of each cell
                    rows = np.arange(len(self.collection))
                    fields[key] = [(name, rows if is_row else _numbers(name, obs[name]))]
                case _:
                    msg = (
                        f"{self._model.__name__} takes {key!r} from {where['attr_name']}, but a "
                        "data module has counts and obs columns alone; use another model"
                    )
                    raise ParameterError(msg)
        if self._unlabelled is not None:
            ((_, codes),) = fields["labels"]
            codes[codes < 0] = self._unlabelled
        return fields

    def _coded(self, name: str, mapping: NDArray[Any]) -> NDArray[np.signedinteger]:
        """Return the code of each cell in a column of categories of a registry."""
        if name not in self.collection.obs:  # no key was given
            return np.zeros(len(self.collection), np.int8)
        cells = _categorical(self.collection.obs[name]).set_categories(mapping)
        codes: NDArray[np.signedinteger] = cells.codes.copy()
        return codes

    @property
    def _unlabelled(self) -> int | None:
        """The code of unlabelled cells; None if the model does not distinguish them."""
        state = self._state("labels")
        if "unlabeled_category" not in state:
            return None
        return [*state["categorical_mapping"]].index(state["unlabeled_category"])

    def _state(self, key: str) -> dict[str, Any]:
        """Return what the registry has of a field, such as its categories; empty without it."""
        fields = self._manager.registry["field_registries"]
        return dict(fields[key]["state_registry"]) if key in fields else {}

    def _codes(self, key: str) -> NDArray[np.signedinteger]:
        """Return the code of each cell in a field of one column."""
        ((_, codes),) = self._tensors.fields[key]
        return codes

    def _labelled(self, rows: Any) -> NDArray[np.int64] | None:
        """Return which of some cells have a label; None if this is not distinguished, or none."""
        if self._unlabelled is None:
            return None
        rows = np.arange(len(self.collection)) if rows is None else np.asarray(rows)
        found: NDArray[np.int64] = rows[self._codes("labels")[rows] != self._unlabelled]
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
        n_of_rank = -(-dataset.strategy.n_positions(len(self.collection)) // dataset.world_size)
        if n_of_rank == 1:
            msg = "a rank has a single cell to train on, or a single one with a label, but layers"
            raise ParameterError(f"{msg} of scvi-tools normalise over a minibatch; give more cells")
        if n_of_rank % dataset.batch_size == 1:
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

    def _loader_of(self, dataset: CellDataset, *, is_persistent: bool = False) -> MinibatchLoader:
        n = self.dataset.num_workers if self._num_workers is None else self._num_workers
        is_kept = is_persistent and n > 0
        return dataset.loader(n, pin_memory=self._pin_memory, persistent_workers=is_kept)

    def _require_values(self, rows: Any) -> None:
        """Check that cells have a value in all columns.

        Raises
        ------
        ColumnError
            One has not.
        """
        of_cells = slice(None) if rows is None else np.asarray(rows)
        for columns in self._tensors.fields.values():
            for name, column in columns:
                values = column[of_cells]
                lacking = np.flatnonzero(
                    np.isnan(values) if values.dtype.kind == "f" else values < 0
                )
                if lacking.size:
                    row = lacking[0] if rows is None else np.asarray(rows)[lacking[0]]
                    msg = (
                        f"obs column {name!r} has no value for {lacking.size:,} of "
                        f"{values.size:,} cells, such as row {row:,}; leave these cells out with "
                        "`split` or `rows`"
                    )
                    raise ColumnError(msg)


# Columns of a field by name, with a value for each cell of the collection: codes, -1 if missing, or
# float32, NaN if missing.
_Columns: TypeAlias = Sequence[tuple[str, NDArray[Any]]]


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
    fields: Mapping[str, _Columns]

    def __call__(self, minibatch: Minibatch) -> dict[str, torch.Tensor]:
        tensors, rows = {"X": minibatch[self.element]}, minibatch.rows.numpy()
        for key, columns in self.fields.items():
            dtype = np.int64 if key in _DISCRETE else np.float32
            values = np.stack([each[rows] for _, each in columns], axis=1)
            tensors[key] = torch.from_numpy(values.astype(dtype))
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


# Columns and arguments.


def _numbers(name: str, column: ObsColumn) -> NDArray[np.float32]:
    """Return the number of each cell, NaN if it is missing; booleans are 0 and 1.

    Raises
    ------
    ColumnError
        The column is text.
    """
    if not isinstance(column, CategoricalColumn):
        return column.values.astype(np.float32)
    try:
        numbers = np.append(column.categories, np.nan).astype(np.float32)
    except ValueError as error:
        msg = f"obs column {name!r} is text, where scvi-tools needs numbers; name another one, or"
        raise ColumnError(f"{msg} give it as one of `categorical_covariate_keys`") from error
    return np.take(numbers, column.codes)


def _categorical(column: ObsColumn) -> pd.Categorical:
    """Return a column as categories; those of numbers ascend."""
    if isinstance(column, CategoricalColumn):
        return pd.Categorical.from_codes(column.codes, pd.Index(column.categories))
    return pd.Categorical(column.values)


def _require_taken(model: Any, setup: Mapping[str, Any]) -> None:
    """Check the keys that a model takes.

    Raises
    ------
    ParameterError
        It does not take one of them, or needs another.
    """
    takes = inspect.signature(model.setup_anndata).parameters
    for name in setup:
        if name not in takes:
            msg = f"{model.__name__} takes no `{name}`; leave it out, or give `model=`"
            raise ParameterError(msg)
    for name, each in takes.items():
        is_needed = each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        if is_needed and name not in ("adata", *setup):
            msg = f"{model.__name__} needs `{name}`; give it, or use another model"
            raise ParameterError(msg)
