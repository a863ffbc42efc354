"""Neighbours of cells: those of NumPy and SciPy, delivered with their cells, and as a graph."""

import pickle
import warnings
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.sampling.suites import PlanConformance

from cellfeed import BlockShuffling, CellDataset, ParameterError, Streaming, open_collection
from cellfeed.spatial import WithNeighbors, graph_neighbors, nearest_neighbors, to_graph
from cellfeed.testing import StrategyCase

N_GENES = 7
SIZES = (60, 41)


def write_slides(folder):
    """Write two files with three slides, and return their paths and all cells."""
    rng, paths, parts = np.random.default_rng(0), [], []
    for number, n in enumerate(SIZES):
        counts = sp.csr_matrix(rng.poisson(0.7, (n, N_GENES)).astype(np.float32))
        slides = pd.Categorical(np.where(np.arange(n) % 3 == 0, "a", f"b{number}"))
        obs = pd.DataFrame({"slide": slides}, index=[f"{number}:{k}" for k in range(n)])
        cells = ad.AnnData(counts, obs=obs, obsm={"spatial": rng.random((n, 2))})
        weights: Any = sp.random(n, n, 0.08, "csr", np.float64, rng)
        cells.obsp["spatial_connectivities"] = (weights + weights.T).tocsr()
        distances = cells.obsp["spatial_connectivities"].copy()
        distances.data = 1 / distances.data
        cells.obsp["spatial_distances"] = distances
        path = folder / f"{number}.{'h5ad' if number else 'zarr'}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what zarr will write some day
            (cells.write_h5ad if number else cells.write_zarr)(path)
        paths.append(path)
        parts.append(cells)
    return paths, ad.concat(parts, pairwise=True)


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return write_slides(tmp_path_factory.mktemp("slides"))


@pytest.fixture(scope="module")
def collection(slides):
    return open_collection(slides[0], elements=["X", "obsm/spatial"], obs=["slide"])


@pytest.fixture
def four():
    return open_collection(ad.AnnData(np.ones((4, 1), np.float32)))


def by_distance(points, slides, k):
    """Return all distances to other cells of the slide, ascending, by brute force."""
    distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
    distances[slides[:, None] != slides] = np.inf
    np.fill_diagonal(distances, np.inf)
    return distances, np.sort(distances, axis=1)[:, :k]


class TestNearest:
    @given(
        n=st.integers(1, 40),
        k=st.integers(1, 8),
        n_slides=st.integers(1, 4),
        is_grid=st.booleans(),
        seed=st.integers(0, 999),
    )
    @settings(max_examples=2 * settings().max_examples)
    def test_are_those_of_brute_force(self, n, k, n_slides, is_grid, seed):
        rng = np.random.default_rng(seed)
        points = rng.integers(0, 4, (n, 2)) if is_grid else rng.random((n, 3))
        labels = rng.integers(0, n_slides, n)
        collection = open_collection(ad.AnnData(np.ones((n, 1), np.float32)))
        found = nearest_neighbors(collection, k, coordinates=points, within=labels)
        distances, expected = by_distance(points, labels, k)
        assert found.shape == (n, k)
        for row, near in enumerate(found):
            there = near[near >= 0]
            assert np.array_equal(near, [*there, *[-1] * (k - there.size)])
            assert row not in there
            assert len({*there}) == there.size
            nearest = expected[row][np.isfinite(expected[row])]
            np.testing.assert_allclose(distances[row, there], nearest)

    def test_are_those_of_a_slide_or_of_a_file(self, collection, slides):
        """Of a column, slides of one name in two files are two; of an array, they are one."""
        points, labels = slides[1].obsm["spatial"], slides[1].obs["slide"].to_numpy(str)
        files = np.repeat(["0", "1"], SIZES)
        for within, own in [
            (None, files),
            ("slide", np.char.add(files, labels)),
            (labels, labels),
            (labels.tolist(), labels),
        ]:
            found = nearest_neighbors(collection, 3, within=within)
            distances, expected = by_distance(points, own, 3)
            np.testing.assert_allclose(np.take_along_axis(distances, found, 1), expected)
            assert found.dtype == np.int32

    @pytest.mark.parametrize("given", ["array", "list", "column"])
    def test_are_none_of_cells_without_a_slide(self, given):
        labels = np.array(["a", None, "a", None], object)
        obs = pd.DataFrame({"slide": labels}, index=list("abcd"))
        four = open_collection(ad.AnnData(np.ones((4, 1), np.float32), obs=obs))
        within = {"array": labels, "list": labels.tolist(), "column": "slide"}[given]
        found = nearest_neighbors(four, 1, coordinates=np.eye(4), within=within)
        assert found.tolist() == [[2], [-1], [0], [-1]]

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"k": 0}, "`k >= 1` must hold"),
            ({"coordinates": "obsm/X_pca"}, "has no element 'obsm/X_pca'"),
            ({"coordinates": np.ones(3)}, r"shape \(101, n_dimensions\), but have \(3,\)"),
            ({"coordinates": np.full((101, 2), np.nan)}, "101 cells are not finite, .* row 0"),
            ({"within": np.ones(3)}, "`within` must have a label for each of 101 rows"),
        ],
    )
    def test_cannot_be_found(self, collection, parameters, message):
        with pytest.raises(ParameterError, match=message):
            nearest_neighbors(**({"collection": collection, "k": 3} | parameters))


class TestOfGraphs:
    @pytest.mark.parametrize("k", [None, 1, 3, 50])
    @pytest.mark.parametrize("name", ["spatial_connectivities", "spatial_distances"])
    def test_are_the_nearest_of_obsp(self, collection, slides, name, k):
        keep: Any = "smallest" if name.endswith("distances") else "largest"
        found = graph_neighbors(collection, slides[1].obsp[name], k, keep=keep)
        dense = slides[1].obsp[name].toarray()
        n_most = max((row != 0).sum() - (row[i] != 0) for i, row in enumerate(dense))
        assert found.shape == (sum(SIZES), n_most if k is None else k)
        for row, near in enumerate(found):
            there = np.flatnonzero(dense[row])
            there = there[there != row]
            sign = 1 if name.endswith("distances") else -1
            expected = there[np.argsort(sign * dense[row, there], kind="stable")][:k]
            assert near[near >= 0].tolist() == expected.tolist()
            assert (near[expected.size :] == -1).all()

    def test_may_be_given_by_file(self, collection, slides):
        graph = slides[1].obsp["spatial_connectivities"]
        whole = graph_neighbors(collection, graph, 4)
        parts = [graph[: SIZES[0], : SIZES[0]], graph[SIZES[0] :, SIZES[0] :]]
        assert np.array_equal(graph_neighbors(collection, parts, 4), whole)

    def test_of_equal_weight_are_the_first(self, four):
        found = graph_neighbors(four, sp.csr_matrix(np.ones((4, 4))), 2)
        assert found.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]

    @pytest.mark.parametrize(
        ("graph", "others", "message"),
        [
            ("spatial", {}, r"must be a sparse matrix, but got 'spatial'; give `adata\.obsp\['sp"),
            (sp.eye(3), {}, r"shape \[\(101, 101\)\] or \[\(60, 60\), \(41, 41\)\]"),
            (sp.eye(101), {}, "`graph` has no neighbours"),
            (
                sp.csr_matrix(np.ones((101, 101))),
                {"keep": "first"},
                "`keep` must be one of 'largest'",
            ),
            (sp.csr_matrix(np.ones((101, 101))), {"k": 0}, "`k >= 1` must hold"),
        ],
    )
    def test_cannot_be_found(self, collection, graph, others, message):
        with pytest.raises(ParameterError, match=message):
            graph_neighbors(collection, graph, **others)


def neighbors_of(n_rows, k, seed):
    rng = np.random.default_rng(seed)
    near = rng.integers(0, n_rows, (n_rows, k))
    near[rng.random((n_rows, k)) < 0.2] = -1
    return near


class TestConformance(PlanConformance):
    max_examples = 60

    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            near = neighbors_of(n_rows, draw(st.integers(1, 4)), draw(st.integers(0, 99)))
            is_random = draw(st.booleans())
            inner = BlockShuffling(draw(st.integers(1, 20))) if is_random else Streaming()
            expected = np.where(near < 0, np.arange(n_rows)[:, None], near)
            return StrategyCase(
                strategy=WithNeighbors(inner, near),
                n_rows=n_rows,
                is_random=is_random,
                is_match=lambda rows, found: found == expected[rows],
            )

        return cases


class TestMinibatches:
    @pytest.mark.parametrize(
        ("dense", "num_workers"),
        [(False, 0), (True, 0), pytest.param(False, 2, marks=pytest.mark.process)],
    )
    def test_are_graphs(self, collection, slides, dense, num_workers):
        torch = pytest.importorskip("torch")
        near = graph_neighbors(collection, slides[1].obsp["spatial_connectivities"], 5)
        strategy = WithNeighbors(BlockShuffling(4), near)
        dataset = CellDataset(
            collection, strategy, 8, 3, dense=dense, seed=0, batch_transform=to_graph
        )
        X, points = slides[1].X.toarray(), slides[1].obsm["spatial"]
        codes = slides[1].obs["slide"].to_numpy(str)
        categories = collection.obs["slide"].categories
        seeds = []
        for graph in dataset.loader(num_workers=num_workers):
            rows, n = graph.nodes.rows.numpy(), graph.n_seeds
            seeds += rows[:n].tolist()
            assert len(graph) == n
            assert np.unique(rows).size == rows.size
            found = graph.nodes.X if dense else graph.nodes.X.to_dense()
            assert graph.nodes.X.layout == (torch.strided if dense else torch.sparse_csr)
            assert np.array_equal(found.numpy(), X[rows])
            assert np.array_equal(graph.nodes["obsm/spatial"].numpy(), points[rows])
            assert categories[graph.nodes.obs["slide"].numpy()].tolist() == codes[rows].tolist()
            assert graph.edge_index.dtype == torch.int64
            edges = [tuple(each) for each in rows[graph.edge_index.numpy().T].tolist()]
            expected = [(other, row) for row in rows[:n] for other in near[row] if other >= 0]
            assert edges == expected
            assert (graph.edge_index[1] < n).all()
            assert {*rows[n:]} == {other for other, _ in expected} - {*rows[:n]}
            assert graph.to("cpu").edge_index is graph.edge_index
        assert sorted(seeds) == list(range(sum(SIZES)))

    def test_come_as_neighbors_of_cells_in_every_form(self, collection):
        near = nearest_neighbors(collection, 3)
        strategy = WithNeighbors(BlockShuffling(4), near)
        dataset = CellDataset(collection, strategy, 8, 2, seed=1)
        minibatch = next(iter(dataset))
        forms = [
            minibatch,
            minibatch.to("cpu", dense=True),
            pickle.loads(pickle.dumps(minibatch)),
            next(iter(dataset.loader())),
            next(iter(CellDataset(collection, strategy, 8, 2, seed=1, as_torch=False))),
        ]
        for each in forms:
            rows = np.asarray(each.rows)
            expected = np.where(near[rows] < 0, rows[:, None], near[rows])
            assert np.asarray(each.neighbors.rows).reshape(-1, 3).tolist() == expected.tolist()
            assert each.controls is None
            assert each.neighbors.neighbors is None

    def test_go_on_where_they_stopped(self, collection):
        near = nearest_neighbors(collection, 3)

        def pairs(minibatches):
            return [(each.rows.tolist(), each.neighbors.rows.tolist()) for each in minibatches]

        def dataset(near=near):
            return CellDataset(collection, WithNeighbors(BlockShuffling(4), near), 8, 2, seed=1)

        first = dataset()
        minibatches = iter(first)
        begun = pairs(next(minibatches) for _ in range(5))
        state = first.state_dict()
        other = dataset()
        other.load_state_dict(state)
        assert begun + pairs(other) == pairs(dataset())
        with pytest.raises(Exception, match="neighbors"):
            dataset(near[:, ::-1].copy()).load_state_dict(state)

    def test_say_what_was_read(self, collection):
        """Neighbours that are seeds of the same fetch are read once."""

        def read(strategy):
            dataset = CellDataset(collection, strategy, 101, seed=0)
            list(dataset)
            return dataset.statistics()

        alone, both = (
            read(each)
            for each in (Streaming(), WithNeighbors(Streaming(), nearest_neighbors(collection, 3)))
        )
        assert both.n_cells == alone.n_cells == 101
        assert both.bytes_read == alone.bytes_read > 0

    def test_that_are_no_graphs(self, collection):
        minibatch = next(iter(CellDataset(collection, Streaming(), 8, seed=0)))
        with pytest.raises(ParameterError, match="one without neighbours"):
            to_graph(minibatch)
        strategy = WithNeighbors(Streaming(), nearest_neighbors(collection, 3))
        cells = next(iter(CellDataset(collection, strategy, 8, seed=0, as_torch=False)))
        with pytest.raises(ParameterError, match="a Cells"):
            to_graph(cells)


@pytest.mark.parametrize(
    ("neighbors", "message"),
    [
        ([1, 2], r"shape \(n_cells, k\), but have the shape \(2,\)"),
        ([[0.5]], "dtype float64"),
        (np.zeros((3, 0), np.int64), "shape"),
        ([[1], [2]], "`-1 <= neighbors < 2` must hold .* from 1 to 2"),
        ([[-2], [1]], "from -2 to 1"),
    ],
)
def test_neighbors_that_cannot_be(neighbors, message):
    with pytest.raises(ParameterError, match=message):
        WithNeighbors(Streaming(), neighbors)


def test_other_parameters_that_cannot_be(collection):
    strategy = WithNeighbors(BlockShuffling(4), np.zeros((3, 1), np.int64))
    with pytest.raises(ParameterError, match="one row for each of 101 cells, but have 3"):
        CellDataset(collection, strategy, 8, seed=0)
    with pytest.raises(ParameterError, match="must deliver cells alone"):
        WithNeighbors(strategy, np.zeros((3, 1), np.int64))
    larger: Any = WithNeighbors(BlockShuffling(4), strategy.neighbors, block_size=8)
    assert larger.strategy.block_size == 8
