"""Every row of the tables in docs/how-to/moving.md, on both sides where the other loader is there.

Of the other loaders, anndata is always installed. `pip install scDataset tiledbsoma-ml annbatch`,
in an environment of their own, tries the others.
"""

import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.storages.memory_maps.written import write_scdl
from tests.loader.storages.soma.written import write_experiment

import cellfeed
from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    ClassBalancedSampling,
    GroupedSampling,
    ParameterError,
    ReadOptions,
    SomaSource,
    Streaming,
    open_collection,
    preshuffle,
    random_split,
    scdataset,
)
from cellfeed.sampling import SamplingStrategy

# Others warn of themselves and of each other.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "moving.md").read_text()
N, N_GENES, BATCH = 640, 30, 32
TESTED = list[tuple[str, str]]()


def rows(section, *starts):
    """Mark a test with the rows of a table that it tries, by how they start."""
    TESTED.extend((section, start) for start in starts)
    return lambda test: test


def test_every_row_is_tried_once():
    names, texts = (re.split(r"^## (.+)\n", TEXT, flags=re.MULTILINE)[k::2] for k in (1, 2))
    for section, text in zip(names, texts, strict=True):
        starts = [start for name, start in TESTED if name == section]
        _, _, *lines = re.findall(r"^\|.*$", text, re.MULTILINE)
        found = [[start for start in starts if line.startswith(f"| {start}")] for line in lines]
        assert [(line, len(each)) for line, each in zip(lines, found, strict=True)] == [
            (line, 1) for line in lines
        ]
        assert len(starts) == len(lines)


@pytest.fixture(scope="module")
def adata():
    """Cells whose first gene is their number, in two plates and four lines that lie together."""
    random = np.random.default_rng(0)
    X: Any = sp.random(N, N_GENES, 0.3, format="lil", dtype=np.float32, random_state=random)
    X[:, 0] = np.arange(1, N + 1)[:, None]
    obs = pd.DataFrame(
        {
            "plate": pd.Categorical(np.repeat(["p1", "p2"], N // 2)),
            "line": pd.Categorical(np.repeat(["a", "b", "c", "d"], N // 4)),
            "size": np.arange(N, dtype=np.float32),
        },
        index=[f"cell {k}" for k in range(N)],
    )
    var = pd.DataFrame(index=[f"gene {k}" for k in range(N_GENES)])
    counts = {"counts": X.tocsr() * 2}
    pca = {"X_pca": random.random((N, 3), np.float32)}
    return ad.AnnData(X.tocsr(), obs=obs, var=var, layers=counts, obsm=pca)


@pytest.fixture(scope="module")
def plates(adata, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    for name in ("p1", "p2"):
        adata[adata.obs["plate"] == name].write_h5ad(folder / f"{name}.h5ad")
    return folder


def array_of(X: Any) -> np.ndarray:
    """Rows of any kind as a dense array."""
    if hasattr(X, "toarray"):
        return np.asarray(X.toarray())
    return X.to_dense().numpy() if hasattr(X, "to_dense") else np.asarray(X)


def numbers(X: Any) -> np.ndarray:
    """The numbers of cells, by their first gene."""
    return (array_of(X).reshape(-1, N_GENES)[:, 0] - 1).astype(int)


def dataset_of(source, strategy, batch_size=BATCH, fetch_factor=4, **options):
    obs = options.pop("obs", ["plate", "line"])
    opened = open_collection(source, obs=obs, **options.pop("opening", {}))
    return CellDataset(
        opened, strategy, batch_size, fetch_factor, seed=0, as_torch=False, **options
    )


def seen(minibatches):
    return np.concatenate([numbers(each.X) for each in minibatches])


in_scdataset = partial(rows, "scDataset")
in_annbatch = partial(rows, "annbatch")
in_annloader = partial(rows, "AnnLoader")
in_soma_ml = partial(rows, "TileDB-SOMA-ML")


class TestScDataset:
    @pytest.fixture
    def theirs(self) -> Any:
        return pytest.importorskip("scdataset", reason="scDataset is not installed")

    @pytest.fixture
    def data(self):
        return np.column_stack([np.arange(N), np.ones(N)])

    @in_scdataset(
        "`scDataset(data_collection,", "`Streaming`, `BlockShuffling`", "`MultiIndexable`, ",
        "`suggest_parameters`, ", "`TypeError` for a wrong parameter",
    )  # fmt: skip
    def test_names_and_parameters(self, theirs, data):
        def parameters(function):
            return list(inspect.signature(function).parameters)

        there = parameters(theirs.scDataset)
        assert parameters(CellDataset)[:4] == ["collection", *there[1:4]]
        assert {*there[1:]} - {*parameters(CellDataset)} == {"fetch_callback", "batch_callback"}
        assert there == [*parameters(scdataset.scDataset)][: len(there)]
        found = [list(CellDataset(data, Streaming(), 64, 2, seed=0))]
        found.append(list(theirs.scDataset(data, theirs.Streaming(), 64, 2, False, seed=0)))
        assert all(map(np.array_equal, *found))
        with pytest.raises((TypeError, ValueError)):
            theirs.scDataset(data, "random", 64)
        with pytest.raises(ParameterError, match="must be a SamplingStrategy"):
            CellDataset(data, "random", 64)  # type: ignore[arg-type]
        assert issubclass(ParameterError, ValueError)

        missing = {each for each in theirs.__all__ if not hasattr(cellfeed, each)}
        strategies = {"BlockShuffling", "BlockWeightedSampling", "ClassBalancedSampling"}
        assert set(theirs.__all__) - missing == strategies | {"SamplingStrategy", "Streaming"}
        gone = {"bionemo_to_tensor", "estimate_sample_size", "suggest_parameters"}
        assert set(theirs.__all__) - gone == set(scdataset.__all__)
        renamed = {"data_collection", "rng", "args", "kwargs"}
        for name in set(scdataset.__all__) - {"SamplingStrategy", "scDataset"}:
            here, there = (parameters(getattr(each, name)) for each in (scdataset, theirs))
            assert set(there) - renamed <= set(here)

    @in_scdataset("`strategy.get_len(data)`", "`strategy.get_indices(data, seed=...)`")
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("Streaming", {}),
            ("BlockShuffling", {"block_size": 8}),
            ("BlockShuffling", {"block_size": 8, "indices": np.arange(3, 99)}),
            ("ClassBalancedSampling", {"labels": np.arange(N) % 3, "total_size": 90}),
        ],
    )
    def test_positions_and_rows(self, theirs, data, name, options):
        here, there = (getattr(each, name)(**options) for each in (cellfeed, theirs))
        assert here.n_positions(len(data)) == there.get_len(data)
        plan = CellDataset(data, here, 16, 2, seed=0).plan(epoch=0)
        found = plan.rows_at(np.arange(plan.n_positions))
        expected = there.get_indices(data, seed=0)
        assert found.size == expected.size
        if name == "Streaming":
            assert np.array_equal(found, expected)
        if name != "ClassBalancedSampling":
            assert sorted(found) == sorted(expected)
        assert np.array_equal(np.sort(plan.fetch(0).rows), np.sort(found[: plan.fetch_size]))

    @in_scdataset("a strategy of your own")
    def test_a_strategy_of_ones_own(self, theirs, data):
        class Backwards(theirs.SamplingStrategy):  # type: ignore[misc, name-defined]
            def get_len(self, data_collection):
                return len(data_collection)

            def get_indices(self, data_collection, seed=None, rng=None):
                return np.arange(len(data_collection))[::-1].copy()

        class BackwardsHere(SamplingStrategy):
            shuffles_fetch = False

            def n_positions(self, n_rows):
                return n_rows

            def epoch_order(self, *, n_rows, epoch_key):
                return lambda positions: n_rows - 1 - positions

        found = list(CellDataset(data, BackwardsHere(), 64, 2, seed=0))
        assert np.array_equal(np.concatenate(found)[:, 0], np.arange(N)[::-1])
        expected = list(theirs.scDataset(data, Backwards(), 64, 2, seed=0))
        assert sorted(map(sum, map(np.ravel, found))) == pytest.approx(
            sorted(map(sum, map(np.ravel, expected)))
        )

    @in_scdataset("`strategy.weights`, which sum to 1", "`BlockWeightedSampling` draws")
    def test_weights(self, theirs, data):
        weights = np.where(np.arange(N) < 10, 9.0, 1.0)
        options: dict[str, Any] = {"weights": weights, "total_size": 4 * int(weights.sum())}
        there = theirs.BlockWeightedSampling(8, **options)
        here = BlockWeightedSampling(8, **options)
        assert there.weights.sum() == pytest.approx(1)
        assert np.asarray(here.weights).tolist() == weights.tolist()
        drawn = here.epoch_order(n_rows=N, epoch_key=0)(np.arange(here.n_positions(N)))
        assert np.array_equal(np.bincount(drawn, minlength=N), 4 * weights)
        assert not np.array_equal(
            np.bincount(there.get_indices(data, seed=0), minlength=N), 4 * weights
        )

    @pytest.mark.process
    @in_scdataset(
        "with worker processes that persist or not", "ranks may get different numbers",
        "`drop_last` may leave", "`rank` and `world_size` may be given alone",
    )  # fmt: skip
    def test_on_purpose(self, theirs, data):
        def ranks(make, strategy):
            own = [
                make(data[:100], strategy, 32, 1, rank=k, world_size=3, seed=0) for k in range(3)
            ]
            return [len(each) for each in own]

        from torch.utils.data import DataLoader  # noqa: PLC0415

        loaders = [
            DataLoader(
                each.scDataset(data, each.BlockShuffling(), 64, 2, seed=0),
                batch_size=None,
                num_workers=1,
            )
            for each in (theirs, scdataset)
        ]
        (there, again), (here, next_one) = ([[*each], [*each]] for each in loaders)
        assert all(a.equal(b) for a, b in zip(there, again, strict=True))
        assert not all(a.equal(b) for a, b in zip(here, next_one, strict=True))
        assert ranks(CellDataset, Streaming()) == [2, 2, 2]
        assert ranks(theirs.scDataset, theirs.Streaming()) == [2, 1, 1]
        assert not [*theirs.scDataset(data[:9], theirs.Streaming(), 10, drop_last=True)]
        with pytest.raises(ParameterError, match="none of 9 rows is left"):
            CellDataset(data[:9], Streaming(), 10, drop_last=True)
        assert theirs.scDataset(data, theirs.Streaming(), 10, world_size=2, seed=0).rank == 0
        with pytest.raises(ParameterError, match="world_size"):
            CellDataset(data, Streaming(), 10, world_size=2, seed=0)

    @in_scdataset("`bionemo_to_tensor`")
    def test_bionemo(self, theirs, adata, tmp_path):
        memmap = pytest.importorskip("bionemo.scdl.io.single_cell_memmap_dataset")
        folder = write_scdl(tmp_path / "cells", adata.X, adata.obs, adata.var)
        store = memmap.SingleCellMemMapDataset(str(folder))
        options = {"fetch_callback": theirs.bionemo_to_tensor, "seed": 0}
        expected = [*theirs.scDataset(store, theirs.Streaming(), 64, 2, **options)]
        found = [*CellDataset(open_collection(folder), Streaming(), 64, 2, dense=True, seed=0)]
        assert all(a.X.equal(b) for a, b in zip(found, expected, strict=True))


class TestAnnbatch:
    """In their environment; cells are numbered by their first gene."""

    @pytest.fixture(scope="class")
    def annbatch(self):
        return pytest.importorskip("annbatch", reason="annbatch is not installed")

    @pytest.fixture(scope="class")
    def store(self, annbatch, plates, tmp_path_factory):
        path = tmp_path_factory.mktemp("store") / "store.zarr"
        paths = [str(each) for each in sorted(plates.glob("*.h5ad"))]
        options = {"shuffle": True, "rng": np.random.default_rng(0), "n_obs_per_chunk": 16}
        annbatch.DatasetCollection(path).add_adatas(paths, **options)
        return path

    @pytest.fixture
    def loader(self, annbatch, store):
        def make(**options):
            loader = annbatch.Loader(preload_to_gpu=False, **options)
            return loader.use_collection(annbatch.DatasetCollection(store, mode="r"))

        return make

    @pytest.fixture
    def labels(self):
        """Runs of classes, for samplers that need them."""
        return pd.Categorical(np.repeat(["a", "b", "c"], [400, 160, 80]))

    @in_annbatch("`DatasetCollection(path).add_adatas(", "`Loader(...).use_collection(collection)`")
    def test_stores(self, annbatch, plates, store, loader, tmp_path):
        preshuffle(plates, tmp_path / "own.zarr", codec="annbatch")
        own = annbatch.Loader(preload_to_gpu=False, batch_size=BATCH, chunk_size=16)
        own.use_collection(annbatch.DatasetCollection(tmp_path / "own.zarr", mode="r"))
        theirs = loader(batch_size=BATCH, chunk_size=16)
        everything = list(range(N))
        for each in (own, theirs):
            assert sorted(np.concatenate([numbers(batch["X"]) for batch in each])) == everything
        for path in (plates, store, tmp_path / "own.zarr"):
            assert sorted(seen(dataset_of(path, Streaming()))) == everything

    @in_annbatch("`add_adatas(..., var_subset=genes)`")
    def test_genes(self, annbatch, plates, tmp_path):
        genes = ["gene 0", "gene 4"]
        paths = [str(each) for each in sorted(plates.glob("*.h5ad"))]
        made = annbatch.DatasetCollection(tmp_path / "some.zarr")
        made.add_adatas(paths, var_subset=genes, shuffle=False)
        theirs, ours = open_collection(tmp_path / "some.zarr"), open_collection(plates, genes=genes)
        assert sorted(theirs.var_names) == sorted(ours.var_names) == genes
        assert theirs[:].X.sum() == pytest.approx(ours[:].X.sum())

    @in_annbatch("`add_adatas`, `add_adata`, `add_datasets`", "all obs columns are read")
    def test_what_is_read(self, annbatch, adata, loader, store):
        own = annbatch.Loader(preload_to_gpu=False, batch_size=BATCH, chunk_size=16)
        parts = [adata[: N // 2].copy(), adata[N // 2 :].copy()]
        for part in parts:
            own.add_adata(part)
        found = open_collection(parts)
        assert own.n_obs == len(found) == N
        first = next(iter(loader(batch_size=BATCH, chunk_size=16)))
        assert {"plate", "line", "size"} <= set(first["obs"].columns)
        assert not open_collection(store).obs
        assert set(open_collection(store, obs=["plate"], elements=["X"]).obs) == {"plate"}

    @in_annbatch("`chunk_size=512`", "`preload_nchunks=32`", "`shuffle=True`, `RandomSampler`")
    def test_random_order(self, loader, store):
        theirs = loader(
            shuffle=True, batch_size=BATCH, chunk_size=16, preload_nchunks=8, return_index=True,
            rng=np.random.default_rng(0),
        )  # fmt: skip
        fetch_factor = 16 * 8 // BATCH
        ours = dataset_of(store, BlockShuffling(16), fetch_factor=fetch_factor)
        n = BATCH * fetch_factor
        for rows in (
            np.concatenate([np.asarray(batch["index"]).ravel() for batch in theirs]),
            np.concatenate([each.rows for each in ours]),
        ):
            assert sorted(rows) == list(range(N))
            assert np.unique(rows[:n] // 16).size == n // 16

    @in_annbatch(
        "`batch_size=` (default 1)", "`shuffle=False`, `SequentialSampler`", "`drop_last=`"
    )
    def test_order_of_storage(self, loader, store):
        assert numbers(next(iter(loader()))["X"]).size == 1
        for drop_last in (False, True):
            theirs = loader(
                shuffle=False,
                batch_size=100,
                chunk_size=20,
                preload_nchunks=10,
                drop_last=drop_last,
            )
            ours = dataset_of(store, Streaming(), 100, 1, drop_last=drop_last)
            for batch, minibatch in zip(theirs, ours, strict=True):
                assert numbers(batch["X"]).tolist() == numbers(minibatch.X).tolist()

    @in_annbatch("`RandomSampler(..., replacement=True", "`mask=slice(start, stop)`")
    def test_draws_and_masks(self, annbatch, loader, store):
        sampler = partial(annbatch.samplers.RandomSampler, 16, 8, BATCH)
        drawn = loader(batch_sampler=sampler(replacement=True, num_samples=320))
        ours = dataset_of(store, BlockWeightedSampling(16, total_size=320))
        assert sum(batch["X"].shape[0] for batch in drawn) == seen(ours).size == 320
        masked = loader(batch_sampler=sampler(mask=slice(64, 192)))
        chosen = dataset_of(store, BlockShuffling(16, indices=np.arange(64, 192)))
        theirs = np.concatenate([numbers(batch["X"]) for batch in masked])
        assert sorted(theirs) == sorted(seen(chosen))

    @in_annbatch("`ClassSampler(", "`WeightedClassSampler(")
    def test_classes(self, annbatch, loader, store, labels):
        options = {"classes": labels, "num_samples": 960}
        names = np.asarray(labels)

        def classes(each):
            return [names[np.asarray(batch["index"]).ravel()] for batch in each]

        one = annbatch.samplers.ClassSampler(BATCH, 4, BATCH, **options)
        for batch in classes(loader(batch_sampler=one, return_index=True)):
            assert np.unique(batch).size == 1
        strategy = GroupedSampling(names, BATCH, weights="equal", n_sets=960 // BATCH)
        ours = list(dataset_of(store, strategy))
        assert all(np.unique(names[each.rows]).size == 1 for each in ours)
        firsts = [names[each.rows[0]] for each in ours]
        assert [firsts.count(each) for each in "abc"] == [10, 10, 10]

        mixed = annbatch.samplers.WeightedClassSampler(8, 40, BATCH, **options)
        theirs = np.concatenate(classes(loader(batch_sampler=mixed, return_index=True)))
        balanced = dataset_of(
            store, ClassBalancedSampling(names, 8, total_size=960), fetch_factor=10
        )
        found = [names[each.rows] for each in balanced]
        for each in (theirs[:BATCH], found[0]):
            assert np.unique(each).size == 3
        counts = [np.count_nonzero(np.concatenate(found) == each) for each in "abc"]
        assert counts == [320, 320, 320]

    @in_annbatch("`DistributedSampler(sampler,")
    def test_ranks(self, annbatch, loader, store):
        def of_rank(rank):
            inner = annbatch.samplers.RandomSampler(16, 8, BATCH)
            sampler = annbatch.samplers.DistributedSampler(inner, dist_info=lambda: (rank, 2))
            return np.concatenate([numbers(each["X"]) for each in loader(batch_sampler=sampler)])

        theirs = np.concatenate([of_rank(rank) for rank in range(2)])
        ours = [dataset_of(store, BlockShuffling(16), rank=rank, world_size=2) for rank in range(2)]
        assert sorted(theirs) == sorted(np.concatenate(list(map(seen, ours)))) == list(range(N))

    @in_annbatch("a `Sampler` of your own", "`rng=`")
    def test_own_samplers_and_seeds(self, annbatch, loader, store):
        assert inspect.isabstract(annbatch.abc.Sampler)
        assert inspect.isabstract(SamplingStrategy)

        def theirs():
            made = loader(
                shuffle=True, batch_size=BATCH, chunk_size=16, rng=np.random.default_rng(3)
            )
            return np.concatenate([numbers(each["X"]) for each in made]).tolist()

        assert theirs() == theirs()
        assert np.array_equal(*(seen(dataset_of(store, BlockShuffling(16))) for _ in range(2)))

    @in_annbatch('`batch["X"]`, `batch["obs"]`', '`to="torch"`', '`to="jax"`')
    def test_minibatches(self, loader, store):
        theirs = loader(shuffle=False, batch_size=BATCH, chunk_size=16, return_index=True)
        ours = dataset_of(store, Streaming())
        plates = ours.collection.obs["plate"]
        for batch, minibatch in zip(theirs, ours, strict=True):
            assert numbers(batch["X"]).tolist() == numbers(minibatch.X).tolist()
            assert np.asarray(batch["index"]).ravel().tolist() == minibatch.rows.tolist()
            assert batch["obs"]["plate"].tolist() == plates.decode(minibatch.obs["plate"]).tolist()
        assert {"torch", "jax"} <= set(
            re.findall(
                r'"(\w+)"', str(inspect.signature(type(theirs)).parameters["to"]).replace("'", '"')
            )
        )

    @in_annbatch("`preload_to_gpu=True`", "`zarr.config.set(")
    def test_gpu_and_codecs(self, annbatch, store):
        assert "preload_to_gpu" in inspect.signature(annbatch.Loader).parameters
        assert "dense" in inspect.signature(cellfeed.Minibatch.to).parameters
        assert open_collection(store).describe()["is_fast"].all()


class TestAnnLoader:
    @pytest.fixture(scope="class")
    def pair(self, plates):
        """An AnnCollection with its loader, and the paths."""
        experimental = pytest.importorskip("anndata.experimental")
        pytest.importorskip("torch")
        paths = sorted(plates.glob("*.h5ad"))
        cells = experimental.AnnCollection(
            [ad.read_h5ad(each, backed="r") for each in paths], join_vars="inner", label=None
        )
        return cells, partial(experimental.AnnLoader, cells, batch_size=BATCH), paths

    @in_annloader("`AnnCollection([read_h5ad", "`join_vars=")
    def test_the_collection(self, pair, adata):
        cells, _, paths = pair
        found = open_collection(paths, join_vars="inner")
        assert found[:].X.shape == cells.shape
        assert np.array_equal(found[5:9].X.toarray(), cells[5:9].X.toarray())
        memory = pytest.importorskip("anndata.experimental").AnnCollection(
            [adata[: N // 2].copy(), adata[N // 2 :].copy()], join_vars="inner"
        )
        assert np.array_equal(open_collection(memory)[5:9].X.toarray(), cells[5:9].X.toarray())

    @in_annloader(
        "`AnnLoader(collection, batch_size=64)`", "`shuffle=False`", "`batch.X`, dense",
        '`batch.obs["cell_line"]`', '`batch.layers["counts"]`', "`batch.obs_names`",
    )  # fmt: skip
    def test_minibatches(self, pair):
        _, loader, paths = pair
        elements = ["X", "layers/counts", "obsm/X_pca"]
        opened = open_collection(paths, obs=["line"], obs_names=True, elements=elements)
        dataset = CellDataset(opened, Streaming(), BATCH, 4, seed=0)
        line: Any = opened.obs["line"]
        found = dataset.loader()
        for minibatch, batch in zip(found, loader(shuffle=False), strict=True):
            assert minibatch.X.is_sparse_csr
            if int(pd.__version__.partition(".")[0]) < 3:  # whose text AnnLoader does not take
                names = line.decode(minibatch.obs["line"].numpy())
                assert names.tolist() == np.asarray(batch.obs["line"]).tolist()
            assert minibatch.obs_names.tolist() == batch.obs_names.tolist()
            for name, theirs in (
                ("X", batch.X),
                ("layers/counts", batch.layers["counts"]),
                ("obsm/X_pca", batch.obsm["X_pca"]),
            ):
                assert np.array_equal(array_of(minibatch[name]), array_of(theirs))

    @in_annloader("`shuffle=True`", "`num_workers=`, `pin_memory=`")
    def test_random_order(self, pair):
        _, loader, paths = pair
        found = CellDataset(open_collection(paths), BlockShuffling(1), BATCH, 4, seed=0)
        ours = seen(found.loader(num_workers=0, pin_memory=False))
        theirs = np.concatenate([numbers(each.X) for each in loader(shuffle=True)])
        assert sorted(ours) == sorted(theirs) == list(range(N))
        assert ours.tolist() != list(range(N)) != theirs.tolist()

    @in_annloader("`convert=", "`use_cuda=True`", "an AnnCollection view")
    def test_what_is_converted_and_selected(self, pair):
        experimental = pytest.importorskip("anndata.experimental")
        cells, _, paths = pair
        opened = open_collection(paths)
        chosen = opened.where("line == 'b'")
        found = CellDataset(
            opened, BlockShuffling(1, indices=chosen), BATCH, 4, seed=0,
            batch_transform=lambda minibatch: 2 * minibatch.to("cpu").X.to_dense(),
        )  # fmt: skip
        cells.convert = {"X": lambda X: 2 * array_of(X)}
        view = cells[np.flatnonzero(np.asarray(cells.obs["line"]) == "b")]
        theirs = experimental.AnnLoader(view, batch_size=BATCH)
        cells.convert = None
        ours = np.concatenate([each.numpy() for each in found])
        expected = np.concatenate([np.asarray(each.X) for each in theirs])
        assert np.array_equal(ours[np.argsort(ours[:, 0])], expected)


class TestSomaMl:
    @pytest.fixture(scope="class")
    def experiment(self, adata, tmp_path_factory):
        pytest.importorskip("tiledbsoma_ml", reason="tiledbsoma-ml is not installed")
        return str(write_experiment(tmp_path_factory.mktemp("soma") / "experiment", adata))

    @pytest.fixture
    def theirs(self, experiment):
        """Their dataset over some cells."""
        soma, ml = (pytest.importorskip(name) for name in ("tiledbsoma", "tiledbsoma_ml"))

        def make(where="plate == 'p1'", **options):
            with soma.Experiment.open(experiment) as opened:
                asked = soma.AxisQuery(value_filter=where) if where else soma.AxisQuery()
                query = opened.axis_query("RNA", obs_query=asked)
                options = {"batch_size": BATCH, "return_sparse_X": True} | options
                return ml.ExperimentDataset(query, layer_name="data", **options)

        return make

    def ours(self, experiment, strategy, where="plate == 'p1'", **options):
        source = SomaSource(experiment, measurement="RNA", layer="data", obs_query=where)
        return dataset_of([source], strategy, obs=["line", "soma_joinid"], **options)

    @in_soma_ml(
        "`exp.axis_query(", "`ExperimentDataset(", "`batch_size=` (default 1)", "`shuffle=False`",
        "`return_sparse_X=True`", "`obs_column_names=", "`X, obs = batch`",
    )  # fmt: skip
    def test_minibatches(self, experiment, theirs):
        dataset = self.ours(experiment, Streaming())
        there = theirs(shuffle=False, obs_column_names=["soma_joinid", "line"])
        lines = dataset.collection.obs["line"]
        for minibatch, (X, obs) in zip(dataset, there, strict=True):
            assert np.array_equal(minibatch.X.toarray(), X.toarray())
            assert minibatch.obs["soma_joinid"].tolist() == obs["soma_joinid"].tolist()
            assert lines.decode(minibatch.obs["line"]).tolist() == obs["line"].tolist()
            names = [f"cell {k}" for k in obs["soma_joinid"]]
            assert dataset.collection.obs_names(minibatch.rows).tolist() == names
        assert next(iter(theirs(batch_size=1)))[0].shape == (1, N_GENES)
        with pytest.raises(TypeError, match="batch_size"):
            CellDataset(dataset.collection, Streaming())  # type: ignore[call-arg]

    @in_soma_ml("`var_query`")
    def test_genes(self, experiment):
        soma, ml = (pytest.importorskip(name) for name in ("tiledbsoma", "tiledbsoma_ml"))
        genes = ["gene 0", "gene 3"]
        with soma.Experiment.open(experiment) as opened:
            query = opened.axis_query("RNA", var_query=soma.AxisQuery(coords=([0, 3],)))
            X, _ = next(iter(ml.ExperimentDataset(query, "data", batch_size=N, shuffle=False)))
        collection = open_collection(experiment, genes=genes)
        assert np.array_equal(collection[:].X.toarray(), X)

    @in_soma_ml(
        "`shuffle_chunk_size=64`", "`io_batch_size=65_536`", "`seed=`", "`set_epoch(epoch)`",
        "`use_eager_fetch`", "`experiment_dataloader(",
    )  # fmt: skip
    def test_random_order(self, experiment, theirs):
        ml = pytest.importorskip("tiledbsoma_ml")
        there = theirs(
            shuffle_chunk_size=16, io_batch_size=4 * BATCH, seed=0, use_eager_fetch=False
        )
        ours = self.ours(experiment, BlockShuffling(16), read_options=ReadOptions(prefetch=2))
        epochs = [seen(ours), seen(ours)]
        expected = [numbers(X) for X, _ in ml.experiment_dataloader(there, num_workers=0)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(np.concatenate(expected))
        assert epochs[0].tolist() != epochs[1].tolist()
        assert seen(self.ours(experiment, BlockShuffling(16))).tolist() == epochs[0].tolist()
        for fetch in (epochs[0][: 4 * BATCH], np.concatenate(expected)[: 4 * BATCH]):
            assert np.unique(np.sort(fetch) // 16).size == 4 * BATCH // 16
        assert seen(ours.loader(num_workers=0)).size == epochs[0].size

    @in_soma_ml("`dataset.random_split(")
    @pytest.mark.parametrize("method", ["deterministic", "stochastic_rounding", "multinomial"])
    def test_splits(self, theirs, method):
        there = theirs(where=None).random_split(0.8, 0.2, seed=0, method=method)
        parts = random_split(N, [0.8, 0.2], seed=0, method=method)
        assert sum(len(each.query_ids.obs_joinids) for each in there) == sum(map(len, parts)) == N
        if method != "multinomial":
            sizes = [len(each.query_ids.obs_joinids) for each in there]
            assert [each.size for each in parts] == sizes == [512, 128]
        default = inspect.signature(type(there[0]).random_split).parameters["method"].default
        assert default == inspect.signature(random_split).parameters["method"].default

    @in_soma_ml("drops up to `world_size - 1` cells")
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_ranks(self, experiment, drop_last):
        """Theirs is as its documentation says; it takes ranks from torch.distributed alone."""
        ranks = [
            self.ours(
                experiment, Streaming(), rank=rank, world_size=3, batch_size=8, drop_last=drop_last
            )
            for rank in range(3)
        ]
        counts = np.bincount(np.concatenate([seen(each) for each in ranks]), minlength=N // 2)
        assert len({len(list(each)) for each in ranks}) == 1
        if not drop_last:
            assert counts.min() == 1
            assert counts.sum() - N // 2 <= 2
