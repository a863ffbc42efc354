"""`SomaSource`: the cells of a TileDB-SOMA experiment, or those that fulfil a query."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, ParameterError
from cellfeed._lazy import pd
from cellfeed._storages._base import Source, Storage, StorageFacts, StoredElement
from cellfeed._storages._soma._elements import (
    JOINID,
    DenseElement,
    SomaElement,
    SomaStore,
    SparseElement,
    columns_of,
    first_line,
    name_column,
    read_joinids,
    read_table,
)


class SomaSource(Source):
    """Cells of a TileDB-SOMA experiment, optionally those that fulfil a query.

    Pass it to `open_collection` in place of a path. The path suffices for a local experiment with a
    single measurement, or one called "RNA", and with a single layer, or ``X["data"]``. cellfeed's
    own threads decode sparse arrays of local experiments; tiledbsoma (``pip install
    'cellfeed[soma]'``), which each process opens for itself, reads everything else.

    Parameters
    ----------
    uri
        The experiment: a folder, or a URI that tiledbsoma opens.
    measurement
        Name of the measurement, which has the genes; by default, the only one, or "RNA".
    layer
        Layer of the measurement's X to read as "X"; by default, the only one, or "data".
    obs_query
        A ``value_filter`` of tiledbsoma, such as ``"cell_type == 'B' and n_counts > 500"``; all
        cells if None. The selected cells are numbered from 0, by ascending ``soma_joinid``.
    tiledb_config
        Further configuration of TileDB, such as ``vfs.s3.region``. It never appears in messages.
        Unless it sets the number of threads, TileDB uses this process's share of the processors.

    Attributes
    ----------
    elements
        ``"X"``; ``"layers/NAME"``, the layers of X by name; ``"raw/X"``, the X of the measurement
        "raw"; and ``"obsm/NAME"``.

    Raises
    ------
    PathError
        There is no experiment.
    FormatError
        The experiment cannot be read, or tiledbsoma is not installed.
    ParameterError
        It has no such measurement or layer, or no cell fulfils the query.

    Examples
    --------
    >>> from cellfeed import SomaSource, open_collection
    >>> source = SomaSource("atlas_soma", obs_query="cell_type == 'B'")  # doctest: +SKIP
    >>> open_collection([source], obs=["donor"])  # doctest: +SKIP
    """

    can_be_forked = False  # TileDB's threads do not survive a fork, which may then crash

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        measurement: str | None = None,
        layer: str | None = None,
        obs_query: str | None = None,
        tiledb_config: Mapping[str, str] | None = None,
    ) -> None:
        self.location = Location.of(uri)
        self._store = SomaStore(self.location, tiledb_config or {})
        self._query = obs_query
        with self._store.failures_named("ms"):
            experiment = self._store()
            self._measurement = self._one_of(list(experiment.ms), measurement, "RNA", "measurement")
            layers = list(experiment.ms[self._measurement].X)
            self._layer = self._one_of(layers, layer, "data", "layer")
        self._joinids = self._read_joinids()
        self.elements = _Elements(self._paths(), self)

    def __repr__(self) -> str:
        query = "" if self._query is None else f", obs_query={self._query!r}"
        return f"SomaSource({str(self.location)!r}, measurement={self._measurement!r}{query})"

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return len(self._joinids)

    def selection(self) -> str:
        """Return the measurement, the layer and the query of its cells."""
        return json.dumps([self._measurement, self._layer, self._query])

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns; the last is ``soma_joinid``."""
        with self._store.failures_named("obs"):
            return [*columns_of(self._store().obs, "obs"), JOINID]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        ids = None if isinstance(self._joinids, range) else self._joinids
        with self._store.failures_named("obs"):
            table = read_table(self._store().obs, columns, ids)
        return table.reset_index(drop=True)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        ids = rows if isinstance(self._joinids, range) else self._joinids[rows]
        with self._store.failures_named("obs"):
            obs = self._store().obs
            names = name_column(obs, "obs")
            wanted = [*columns] if names is None else [*columns, names]
            table = read_table(obs, wanted, ids if ids.size else np.arange(1)).iloc[: ids.size]
        index = [str(each) for each in (table.index if names is None else table[names])]
        table = table[[*columns]].set_index(pd.Index(index, dtype=object))
        return table.astype({name: "string" for name in table if table[name].dtype == object})

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes of the measurement."""
        with self._store.failures_named("var"):
            var = self._store().ms[self._measurement].var
            names = name_column(var, "var")
            wanted = [*([] if names is None else [names]), *columns_of(var, "var")]
            table = read_table(var, wanted, None)
        index = table.index.astype(str) if names is None else table.pop(names)
        return table.set_index(pd.Index(index, dtype=object, name=None))

    def _read_joinids(self) -> NDArray[np.int64] | range:
        with self._store.failures_named("obs"):
            obs = self._store().obs
            if self._query is None:
                return read_joinids(obs, None)
        try:
            ids = read_joinids(obs, self._query)
        except Exception as error:
            msg = f"{self.location}: obs_query={self._query!r} is not a valid value_filter"
            columns = ", ".join(obs.keys())
            raise ParameterError(
                f"{msg} ({first_line(error)}); its obs columns are: {columns}"
            ) from error
        if not len(ids):
            msg = f"{self.location}: no cell fulfils obs_query={self._query!r}; give another query"
            raise ParameterError(msg)
        return ids

    def _one_of(self, there: list[str], given: str | None, usual: str, what: str) -> str:
        if given in there:
            return str(given)
        if given is None and (len(there) == 1 or usual in there):
            return there[0] if len(there) == 1 else usual
        listed = ", ".join(map(repr, there)) or "none"
        said = f"has no {what} {given!r}" if given is not None else f"has no {what} {usual!r}"
        msg = f"{self.location}: {said}; give `{what}=` to `SomaSource`, one of: {listed}"
        raise ParameterError(msg)

    def _paths(self) -> dict[str, tuple[str, str | None]]:
        """Return the paths of elements in the experiment, and of the tables of their columns."""
        with self._store.failures_named("ms"):
            experiment = self._store()
            of = f"ms/{self._measurement}"
            measurement, var = experiment.ms[self._measurement], f"{of}/var"
            paths: dict[str, tuple[str, str | None]] = {"X": (f"{of}/X/{self._layer}", var)}
            paths |= {f"layers/{name}": (f"{of}/X/{name}", var) for name in measurement.X}
            if "raw" in experiment.ms and "X" in experiment.ms["raw"]:
                raw = list(experiment.ms["raw"].X)
                if raw:
                    layer = self._layer if self._layer in raw else raw[0]
                    paths["raw/X"] = f"ms/raw/X/{layer}", "ms/raw/var"
            if "obsm" in measurement:
                paths |= {f"obsm/{name}": (f"{of}/obsm/{name}", None) for name in measurement.obsm}
        return paths

    def _element(self, path: str, var: str | None) -> SomaElement:
        with self._store.failures_named(path):
            kind = self._store.at(path).soma_type
        if kind not in ("SOMASparseNDArray", "SOMADenseNDArray"):
            msg = f"{self.location}: `{path}` is a {kind}, which has no rows of cells"
            raise FormatError(f"{msg}; read another element")
        of_kind = SparseElement if kind == "SOMASparseNDArray" else DenseElement
        return of_kind(self._store, path, var, self._joinids)


class _Elements(Mapping[str, StoredElement]):
    """Elements by name, each opened when it is accessed."""

    def __init__(self, paths: Mapping[str, tuple[str, str | None]], source: SomaSource) -> None:
        self._paths, self._source = paths, source
        self._opened = dict[str, StoredElement]()

    def __getitem__(self, name: str) -> StoredElement:
        if name not in self._opened:
            self._opened[name] = self._source._element(*self._paths[name])  # noqa: SLF001 - its own
        return self._opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


# Folders that are TileDB-SOMA experiments.


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has all
    return [SomaSource(location)]


def _is_group(path: Path) -> bool:
    """Return whether a folder is a group of TileDB, without importing tiledbsoma."""
    return (path / "__group").is_dir() or (path / "__tiledb_group.tdb").is_file()


SOMA = Storage(
    name="TileDB-SOMA",
    open=_open,
    suffixes=(".soma",),
    recognizes=_is_group,
    extra="soma",
    facts=StorageFacts(
        recognized="a folder that is a TileDB group, or a `SomaSource` with a query",
        reading=(
            "local sparse arrays: compiled threads decode the tiles; others: tiledbsoma, one query "
            "per fetch"
        ),
        threads="any number; TileDB's own where tiledbsoma reads",
        remote="TileDB URIs, with `SomaSource`",
    ),
)
