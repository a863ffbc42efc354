"""Cells with their neighbours, for spatial models: in space, or in a graph of ``obsp``.

`nearest_neighbors` and `graph_neighbors` find the neighbours of each cell, `WithNeighbors` delivers
them with it, and `to_graph` makes a graph of a minibatch, in the form of PyTorch Geometric.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.collection import Collection
from cellfeed.extending import (
    ParameterError,
    require_one_of,
    require_positive,
    sp,
    usable_cpu_count,
)
from cellfeed.sampling import SamplingStrategy, WithOthers
from cellfeed.splits import labels_of

if TYPE_CHECKING:
    import torch

    from cellfeed import Minibatch

__all__ = ["Graph", "WithNeighbors", "graph_neighbors", "nearest_neighbors", "to_graph"]

Neighbors = NDArray[np.signedinteger[Any]]


# Which neighbours each cell has.


def nearest_neighbors(
    collection: Collection,
    k: int,
    *,
    coordinates: str | ArrayLike = "obsm/spatial",
    within: str | ArrayLike | None = None,
) -> Neighbors:
    """Return the k nearest neighbours in space of each cell, among the cells of its slide.

    They are exact (SciPy's ``cKDTree``); among cells at the same distance, any may be chosen.

    Parameters
    ----------
    collection
        The collection.
    k
        Number of neighbours.
    coordinates
        The element with the coordinates, which the collection was opened with; or an array, shape
        (n_cells, n_dimensions).
    within
        The obs column that names the slide of each cell in its file: slides of one name in two
        files are two, since their coordinates have nothing in common. Or an array with the slide of
        each cell, whatever its file. By default, each file is a slide. Cells without a slide have
        no neighbours.

    Returns
    -------
    Rows of the neighbours of each cell, nearest first, int32 (int64 in a collection of 2^31 cells
    or more), shape (n_cells, k); -1 after the last neighbour, where a slide has k cells or fewer.

    Raises
    ------
    ParameterError
        The collection was opened without the coordinates, or some are not finite.
    ColumnError
        obs has no such column.

    Examples
    --------
    >>> import anndata
    >>> from cellfeed import open_collection
    >>> cells = anndata.AnnData(np.eye(4), obsm={"spatial": np.array([[0], [1], [3], [7]])})
    >>> nearest_neighbors(open_collection(cells, elements=["X", "obsm/spatial"]), 2)
    array([[1, 2],
           [0, 2],
           [1, 0],
           [2, 1]], dtype=int32)
    """
    from scipy.spatial import cKDTree  # noqa: PLC0415 - few need it

    k, n_cells = require_positive("k", k), len(collection)
    points = _points(collection, coordinates)
    found = np.full((n_cells, k), -1, _dtype_of_rows(n_cells))
    for rows in _slides(collection, within):
        n = min(k + 1, rows.size)  # with the cell itself
        _, near = cKDTree(points[rows]).query(points[rows], n, workers=usable_cpu_count())
        near = near.reshape(rows.size, n)  # SciPy leaves out an axis of one
        # Of several cells at one place, the cell itself need not be the first, or among them.
        is_self = near == np.arange(rows.size)[:, None]
        is_self[~is_self.any(axis=1), -1] = True
        found[rows, : n - 1] = rows[near[~is_self].reshape(rows.size, n - 1)]
    return found


def _slides(collection: Collection, within: str | ArrayLike | None) -> Iterable[NDArray[np.intp]]:
    """Return the rows of each slide, ascending."""
    slides = np.repeat(np.arange(len(collection.sources)), collection.cells_per_location)
    if within is not None:
        given: Any = np.asarray(within, object) if isinstance(within, list | tuple) else within
        labels = labels_of(collection, given, "within", slice(None), len(collection))
        codes = labels.codes.astype(np.int64)
        slides = slides * len(labels) + codes if isinstance(within, str) else codes
        if None in labels.labels:
            slides[codes == labels.labels.index(None)] = -1
    by_slide = np.argsort(slides, kind="stable")
    starts = np.flatnonzero(np.diff(slides[by_slide], prepend=-1))
    return np.split(by_slide, starts)[1:]  # the first ones have no slide


def _points(collection: Collection, coordinates: str | ArrayLike) -> NDArray[np.float64]:
    given: Any = coordinates
    if isinstance(coordinates, str):
        given = collection.of_element(coordinates)[:][coordinates]
    points = np.asarray(given, np.float64)
    if points.ndim != 2 or len(points) != len(collection):  # noqa: PLR2004 - cells, dimensions
        msg = (
            f"`coordinates` must have the shape ({len(collection)}, n_dimensions), but have "
            f"{points.shape}"
        )
        raise ParameterError(msg)
    unknown = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if unknown.size:
        msg = (
            f"`coordinates` of {unknown.size:,} cells are not finite, such as those of row "
            f"{unknown[0]}; give such cells no slide in `within`, and coordinates of 0"
        )
        raise ParameterError(msg)
    return points


def _dtype_of_rows(n_cells: int) -> type[np.signedinteger[Any]]:
    return np.int32 if n_cells < 1 << 31 else np.int64


def graph_neighbors(
    collection: Collection,
    graph: Any,
    k: int | None = None,
    *,
    keep: Literal["largest", "smallest"] = "largest",
) -> Neighbors:
    """Return the neighbours of each cell in a graph, such as one of squidpy or scanpy.

    Parameters
    ----------
    collection
        The collection.
    graph
        A sparse matrix of shape (n_cells, n_cells), such as ``adata.obsp["connectivities"]``, or a
        list of one for each file. Row i has the neighbours of cell i; an entry of a cell for itself
        does not count.
    k
        Number of neighbours to keep; all, as many as the cell with most has, if None.
    keep
        Whether to keep the entries with the largest values (connectivities) or with the smallest
        ones (distances); among equal ones, those of the first rows.

    Returns
    -------
    Rows of the neighbours of each cell, in the order of ``keep``, int32 (int64 in a collection of
    2^31 cells or more), shape (n_cells, k); -1 after the last neighbour.

    Raises
    ------
    ParameterError
        The matrix is of another shape, or has no entries.

    Examples
    --------
    >>> import anndata, scipy.sparse
    >>> from cellfeed import open_collection
    >>> weights = scipy.sparse.csr_matrix(np.array([[0, 0.1, 0.9], [0.1, 0, 0], [0.9, 0, 0]]))
    >>> graph_neighbors(open_collection(anndata.AnnData(np.eye(3))), weights)
    array([[ 2,  1],
           [ 0, -1],
           [ 0, -1]], dtype=int32)
    """
    if isinstance(graph, str):
        msg = f"`graph` must be a sparse matrix, but got {graph!r}; give `adata.obsp[{graph!r}]`"
        raise ParameterError(msg)
    graphs = list(graph) if isinstance(graph, list | tuple) else [graph]
    require_one_of("keep", keep, ("largest", "smallest"))
    n_cells, shapes = len(collection), [each.shape for each in graphs]
    allowed = [[(n_cells, n_cells)], [(n, n) for n in collection.cells_per_location]]
    if shapes not in allowed:
        wanted = " or ".join(map(str, allowed if len(allowed[1]) > 1 else allowed[:1]))
        raise ParameterError(f"`graph` must have the shape {wanted}, but has {shapes}")
    entries = sp.block_diag(graphs, format="coo")
    is_other = entries.row != entries.col
    rows, columns = entries.row[is_other], entries.col[is_other]
    values = entries.data[is_other].astype(np.float64)
    order = np.lexsort((columns, -values if keep == "largest" else values, rows))
    rows, columns = rows[order], columns[order]
    ranks = np.arange(rows.size) - np.searchsorted(rows, rows)
    most = int(ranks.max(initial=-1)) + 1
    if not most:
        raise ParameterError("`graph` has no neighbours; give one that has some")
    k = most if k is None else require_positive("k", k)
    found = np.full((n_cells, k), -1, _dtype_of_rows(n_cells))
    is_kept = ranks < k
    found[rows[is_kept], ranks[is_kept]] = columns[is_kept]
    return found


# The strategy, and the graph of a minibatch.


@dataclass(frozen=True, eq=False)
class WithNeighbors(WithOthers):
    """Visit the cells of any strategy, each together with its neighbours.

    A fetch reads the cells and their neighbours at once, each row once. Minibatches have the cells
    of the strategy as usual, and their neighbours as ``minibatch.neighbors``, k for each cell, with
    the cell itself where it has fewer; `to_graph` makes a graph of both. Neighbours are not drawn
    at random, and may be any cells of the collection, whatever ``indices`` the strategy has.

    Parameters
    ----------
    strategy
        Chooses the cells.
    neighbors
        Rows of the neighbours of each cell, shape (n_cells, k), -1 for none: the result of
        `nearest_neighbors` or `graph_neighbors`.
    block_size
        Replaces the block size of the strategy, if it has one.

    Raises
    ------
    ParameterError
        The neighbours are not such an array, or a neighbour is beyond the collection.

    Examples
    --------
    >>> from cellfeed import Streaming
    >>> strategy = WithNeighbors(Streaming(), np.array([[1], [0], [-1]]))
    >>> order = strategy.epoch_order(n_rows=3, epoch_key=0)
    >>> order.companions(np.array([0, 1, 2]), together=3).tolist()
    [[1], [0], [2]]
    """

    companion_name = "neighbors"

    strategy: SamplingStrategy
    neighbors: Neighbors
    block_size: int | None = None

    def __post_init__(self) -> None:
        """Check the neighbours."""
        strategy: Any = self.strategy
        if not isinstance(strategy, SamplingStrategy) or strategy.n_companions:
            msg = f"`strategy` must deliver cells alone, but got {self.strategy!r}"
            raise ParameterError(msg)
        given = np.asarray(self.neighbors)
        if given.ndim != 2 or not given.size or given.dtype.kind != "i":  # noqa: PLR2004
            msg = (
                "`neighbors` must be signed integers of shape (n_cells, k), but have the shape "
                f"{given.shape} and the dtype {given.dtype}"
            )
            raise ParameterError(msg)
        if given.min() < -1 or given.max() >= len(given):
            msg = (
                f"`-1 <= neighbors < {len(given)}` must hold (the number of cells), but they are "
                f"from {given.min()} to {given.max()}"
            )
            raise ParameterError(msg)
        self._set(neighbors=given)
        self._take_block_size()

    @property
    def n_companions(self) -> int:
        """Number of neighbours that come with each cell, k."""
        return int(self.neighbors.shape[1])

    def n_positions(self, n_rows: int) -> int:
        """Return the number of cells that an epoch visits, without their neighbours."""
        if len(self.neighbors) != n_rows:
            msg = (
                f"`neighbors` must have one row for each of {n_rows:,} cells, but have "
                f"{len(self.neighbors):,}"
            )
            raise ParameterError(msg)
        return self.strategy.n_positions(n_rows)

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> _WithNeighbors:
        """Return the strategy's order, with neighbours."""
        order = self.strategy.epoch_order(n_rows=n_rows, epoch_key=epoch_key)
        return _WithNeighbors(order, self.neighbors)

    def bound_to(self, collection: Any) -> WithNeighbors:
        """Return this strategy, with the data that its own strategy needs."""
        strategy = self.strategy.bound_to(collection)
        return self if strategy is self.strategy else changed(self, strategy=strategy)


@dataclass(frozen=True, slots=True, eq=False)
class _WithNeighbors:
    """An order of cells, with their neighbours; see `cellfeed.sampling.MatchedOrder`."""

    order: Any
    neighbors: Neighbors

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self.order(positions)
        return rows

    def companions(self, positions: NDArray[np.int64], *, together: int) -> NDArray[np.int64]:
        del together  # neighbours are the same, whatever is read together
        rows = self.order(positions)
        found = self.neighbors[rows].astype(np.int64)
        near: NDArray[np.int64] = np.where(found < 0, rows[..., None], found)
        return near


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The graph of a minibatch.

    Parameters
    ----------
    nodes
        The cells of the minibatch (seeds), and after these their neighbours that are not among
        them, each once: elements, obs columns and rows in the collection.
    edge_index
        Edges from a neighbour (row 0) to its seed (row 1), as PyTorch Geometric has them: numbers
        of nodes, int64, shape (2, n_edges). They are in the order of seeds, and of the neighbours
        of a seed. The edges of neighbours that are no seeds are not there.
    n_seeds
        Number of seeds, the first nodes; losses are usually those of these.
    """

    nodes: Minibatch
    edge_index: torch.Tensor
    n_seeds: int

    def __len__(self) -> int:
        return self.n_seeds

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Graph:
        """Return the same graph on a device."""
        nodes = self.nodes.to(device, non_blocking=non_blocking)
        return Graph(nodes, self.edge_index.to(device, non_blocking=non_blocking), self.n_seeds)


def to_graph(minibatch: Minibatch) -> Graph:
    """Return the graph of a minibatch of `WithNeighbors`, for ``batch_transform``.

    Parameters
    ----------
    minibatch
        A minibatch of tensors, sparse or dense.

    Raises
    ------
    ParameterError
        It has no neighbours, or has elements whose rows differ in length.

    Examples
    --------
    >>> import anndata
    >>> from cellfeed import CellDataset, Streaming, open_collection
    >>> collection = open_collection(anndata.AnnData(np.eye(4, dtype="float32")))
    >>> strategy = WithNeighbors(Streaming(), np.array([[1, 3], [0, 3], [-1, -1], [1, 2]]))
    >>> dataset = CellDataset(collection, strategy, 2, seed=0, batch_transform=to_graph)
    >>> graph = next(iter(dataset))
    >>> graph.nodes.rows, graph.n_seeds
    (tensor([0, 1, 3]), 2)
    >>> graph.edge_index
    tensor([[1, 2, 0, 2],
            [0, 0, 1, 1]])
    """
    import torch  # noqa: PLC0415 - it takes long, and few need it

    from cellfeed import Minibatch  # noqa: PLC0415 - it imports torch

    given: Any = minibatch
    near = getattr(given, "neighbors", None)
    if not isinstance(given, Minibatch) or near is None:
        what = f"a {type(given).__name__}" if near is not None else "one without neighbours"
        msg = f"`to_graph` takes minibatches of tensors of `WithNeighbors`, but got {what}"
        raise ParameterError(msg)
    n, k = len(minibatch), len(near) // len(minibatch)
    rows = torch.cat([minibatch.rows, near.rows]).numpy(force=True)
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    places = first[inverse]  # where the row of each is first
    is_node = places == np.arange(rows.size)
    is_node[:n] = True
    numbers = np.cumsum(is_node) - 1
    targets = np.repeat(np.arange(n), k)
    is_edge = rows[n:] != rows[targets]
    sources = numbers[places[n:]]
    edges = torch.from_numpy(np.stack([sources[is_edge], targets[is_edge]]))
    added = torch.from_numpy(np.flatnonzero(is_node[n:])).to(minibatch.rows.device)
    nodes = Minibatch(
        {name: _appended(name, each, near[name], added) for name, each in minibatch.items()},
        {name: torch.cat([each, near.obs[name][added]]) for name, each in minibatch.obs.items()},
        torch.cat([minibatch.rows, near.rows[added]]),
        None
        if minibatch.obs_names is None
        else np.concatenate([minibatch.obs_names, near.obs_names[added.numpy(force=True)]]),
    )
    return Graph(nodes, edges.to(minibatch.rows.device), n)


def _appended(name: str, tensor: Any, others: Any, which: torch.Tensor) -> torch.Tensor:
    """Return the rows of a dense or CSR tensor, and after these some of another one."""
    import torch  # noqa: PLC0415 - see `to_graph`

    from cellfeed.extending import csr_tensor  # noqa: PLC0415 - it imports torch

    if not isinstance(tensor, torch.Tensor):
        msg = f"rows of the element {name!r} differ in length, which nodes of a graph cannot have"
        raise ParameterError(msg)
    if tensor.layout != torch.sparse_csr:
        return torch.cat([tensor, others[which]])
    pointers = others.crow_indices()
    starts, lengths = pointers[which], (pointers[1:] - pointers[:-1])[which]
    ends = torch.cumsum(lengths, 0)
    n_values = int(ends[-1]) if len(ends) else 0
    shifts = torch.repeat_interleave(starts - (ends - lengths), lengths)
    places = torch.arange(n_values, device=pointers.device) + shifts
    own = tensor.crow_indices()
    return csr_tensor(
        torch.cat([own, (own[-1] + ends).to(own.dtype)]),
        torch.cat([tensor.col_indices(), others.col_indices()[places]]),
        torch.cat([tensor.values(), others.values()[places]]),
        (tensor.shape[0] + len(which), tensor.shape[1]),
    )
