"""Models of scvi-tools train on a collection as on the same AnnData in memory."""

import contextlib
import inspect
import json
import logging
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    ParameterError,
    StateError,
    open_collection,
    random_split,
)

torch = pytest.importorskip("torch")
scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed: cellfeed[scvi]")

from lightning.pytorch import Callback  # noqa: E402 - which comes with scvi-tools
from scvi import external  # noqa: E402
from scvi.dataloaders import DataSplitter  # noqa: E402
from scvi.model import PEAKVI, SCANVI, SCVI, LinearSCVI  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from cellfeed.frameworks.scvi import ScviDataModule  # noqa: E402

MRVI: Any = getattr(external, "TorchMRVI", None) or external.MRVI  # its name from 1.5 on

# scvi-tools and Lightning warn of their own settings, such as the number of workers.
pytestmark = pytest.mark.filterwarnings("ignore")

N_CELLS, N_GENES = 210, 40
UNLABELLED = "Unknown"
SMALL = {"n_hidden": 8, "n_latent": 3}
TRAINING = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
KEYS: dict[str, Any] = {
    "layer": "counts",
    "batch_key": "plate",
    "labels_key": "cell_type",
    "size_factor_key": "n_counts",
    "categorical_covariate_keys": ["donor", "is_male"],
    "continuous_covariate_keys": ["age", "score"],
}
BATCHES: dict[str, Any] = {"layer": "counts", "batch_key": "plate"}
LABELS: dict[str, Any] = {"labels_key": "cell_type", "unlabeled_category": UNLABELLED}


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    scvi.settings.seed = 0
    scvi.settings.verbosity = logging.ERROR


def cells(n=N_CELLS, seed=0, plates=("p1", "p2", "p3")):
    random = np.random.default_rng(seed)
    counts = sp.csr_matrix(random.poisson(1.5, (n, N_GENES)), dtype=np.float32)
    names = ["B", UNLABELLED, "NK", "T"]
    obs = pd.DataFrame(
        {
            "plate": pd.Categorical(np.resize(plates, n), categories=list(plates)),
            "cell_type": pd.Categorical(random.choice(names, n), categories=names),
            "donor": np.resize([7, 3, 11, 3, 5], n),
            "is_male": np.resize([True, False, False], n),
            "n_counts": counts.sum(axis=1).A1.astype(np.float64),
            "age": np.resize([20, 30, 41], n),
            "score": random.normal(size=n),
        },
        index=[f"cell{seed}-{k}" for k in range(n)],
    )
    var = pd.DataFrame(index=[f"gene{k}" for k in range(N_GENES)])
    return ad.AnnData(counts.log1p(), obs, var, layers={"counts": counts})


@pytest.fixture(scope="module")
def in_memory():
    return cells()


@pytest.fixture(scope="module")
def paths(in_memory, tmp_path_factory):
    """The cells in two files, with the categories of all of them."""
    folder = tmp_path_factory.mktemp("plates")
    for name, rows in (("a", slice(0, 100)), ("b", slice(100, None))):
        in_memory[rows].copy().write_h5ad(folder / f"{name}.h5ad", compression="gzip")
    return folder


def same(one, other):
    """Whether two registries agree, except for what identifies an AnnData."""
    if isinstance(one, dict):
        names = (one.keys() | other.keys()) - {"_scvi_uuid", "n_obs_per_sample"}
        return all(same(one[name], other[name]) for name in names)
    if isinstance(one, np.ndarray | list | pd.Index):
        return np.array_equal(np.asarray(one, object), np.asarray(other, object))
    return one == other


def set_up(model, adata, **keys):
    copy = adata.copy()
    model.setup_anndata(copy, **keys)
    return copy


def first_of(minibatch):
    """Those of all cells, where there are also some that have labels."""
    return minibatch[0] if isinstance(minibatch, tuple | list) else minibatch


def manager_of(model, adata):
    return model._get_most_recent_anndata_manager(adata, required=True)


SETUPS = [
    (SCVI, KEYS),
    (SCVI, {}),
    (SCVI, {"layer": "counts", "batch_key": "donor"}),
    (SCANVI, KEYS | LABELS),
    (SCANVI, {"labels_key": "cell_type", "unlabeled_category": "none is"}),
    (LinearSCVI, {"layer": "counts", "batch_key": "is_male", "labels_key": "plate"}),
    (MRVI, {"layer": "counts", "batch_key": "plate", "sample_key": "donor"}),
]


def rows_of(data, paths, n_epochs=1, **options):
    """The rows of each minibatch of the training, by an ordinary dataset of the same settings."""
    strategy = options.pop("strategy", BlockShuffling(16))
    dataset = CellDataset(open_collection(paths), strategy, data.dataset.batch_size, seed=0)
    return [each.rows.numpy() for _ in range(n_epochs) for each in dataset]


class TestWhatSetupAnndataTakes:
    @pytest.mark.parametrize("fmt", ["files", "dense", "zarr", "object"])
    @pytest.mark.parametrize(("model", "keys"), SETUPS)
    def test_registry_and_minibatches_are_those_of_scvi_tools(
        self, in_memory, paths, tmp_path, model, keys, fmt
    ):
        stored = in_memory.copy()
        path: Any = {"files": paths, "object": stored}.get(fmt, tmp_path / f"cells.{fmt}")
        if fmt == "dense":
            path = path.with_suffix(".h5ad")
            stored.X, stored.layers["counts"] = map(dense, (stored.X, stored.layers["counts"]))
            stored.write_h5ad(path)
        elif fmt == "zarr":
            stored.write_zarr(path)
        data = ScviDataModule(path, model, **keys, batch_size=32)
        manager = manager_of(model, set_up(model, in_memory, **keys))
        assert same(data.registry, manager.registry)
        expected, rows = manager.create_torch_dataset(), rows_of(data, path)
        assert sum(map(len, rows)) == N_CELLS
        for minibatch, these in zip(data.train_dataloader(), rows, strict=True):
            tensors = first_of(minibatch)
            wanted = {name: torch.as_tensor(each) for name, each in expected[these].items()}
            assert tensors.keys() == wanted.keys()
            for name, values in wanted.items():
                assert torch.equal(tensors[name], values), name
                assert tensors[name].dtype == values.dtype, name

    def test_booleans_are_numbers_as_in_memory(self, in_memory):
        keys: dict[str, Any] = {
            "size_factor_key": "is_male",
            "continuous_covariate_keys": ["score", "is_male", "score"],
        }
        adata = in_memory[1:].copy()  # which begins with False
        expected = manager_of(SCVI, set_up(SCVI, adata, **keys)).create_torch_dataset()
        data = ScviDataModule(adata, **keys)
        (first, *_) = data.inference_dataloader(batch_size=209)
        for name in ("size_factor", "extra_continuous_covs"):
            assert np.array_equal(first[name], expected[np.arange(209)][name])

    def test_a_collection_may_be_given(self, paths):
        collection = open_collection(paths, obs=["plate", "score"], elements=["X", "layers/counts"])
        data = ScviDataModule(collection, **BATCHES, batch_size=70)
        (first, *_), rows = data.train_dataloader(), rows_of(data, paths)
        assert np.array_equal(first["X"], collection[rows[0]]["layers/counts"].toarray())

    def test_sparse_minibatches_become_dense_on_the_device(self, paths):
        sparse = ScviDataModule(paths, load_sparse_tensor=True, batch_size=70)
        dense = ScviDataModule(paths, batch_size=70)
        loaders = sparse.train_dataloader(), dense.train_dataloader()
        for one, other in zip(*loaders, strict=True):
            assert one["X"].layout is torch.sparse_csr
            moved = sparse.on_after_batch_transfer(one, 0)
            assert all(torch.equal(moved[name], other[name]) for name in other)


class Watching(Callback):  # type: ignore[misc]
    """Sets the state of random numbers before each step, and keeps what comes."""

    def __init__(self, path=None, n_wanted=None):
        self.losses, self.sums, self.path, self.n_wanted = [], [], path, n_wanted

    def on_train_batch_start(self, trainer, plan, batch, number):
        torch.manual_seed(trainer.global_step)
        self.sums.append(first_of(batch)["X"].double().sum(dim=0).tolist())

    def on_train_batch_end(self, trainer, plan, outputs, batch, number):
        self.losses.append(float(outputs["loss"]))
        if len(self.losses) == self.n_wanted:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


class InMemory(DataSplitter):  # type: ignore[misc]
    """scvi-tools' own data module, with given minibatches."""

    def __init__(self, manager, minibatches):
        super().__init__(manager, train_size=1.0)
        self.cells, self.minibatches = manager.create_torch_dataset(), minibatches

    def tensors(self, rows):
        return {name: torch.as_tensor(each) for name, each in self.cells[rows].items()}

    def train_dataloader(self):
        minibatches: Any = [
            tuple(map(self.tensors, rows)) if isinstance(rows, tuple) else self.tensors(rows)
            for rows in self.minibatches
        ]
        return DataLoader(minibatches, batch_size=None)


def train(model, datamodule, n_epochs=2, **options):
    watching = options.pop("watching", None) or Watching()
    model.train(n_epochs, datamodule=datamodule, callbacks=[watching], **TRAINING, **options)
    return watching


def made(model, *arguments, **options):
    scvi.settings.seed = 0
    return model(*arguments, **options, **SMALL)


@pytest.mark.parametrize("model", [SCVI, LinearSCVI])
def test_losses_are_those_of_the_same_minibatches_in_memory(paths, in_memory, model):
    keys = KEYS if model is SCVI else BATCHES
    own = made(model, set_up(model, in_memory, **keys))
    data = ScviDataModule(paths, model, **keys, batch_size=32, seed=0)
    loaded = made(data.new_model)
    expected = train(own, InMemory(own.adata_manager, rows_of(data, paths)), 1)
    found = train(loaded, data, 1)
    assert len(found.losses) == 7
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    for name, values in own.module.state_dict().items():
        torch.testing.assert_close(loaded.module.state_dict()[name], values)


@pytest.mark.slow
def test_losses_of_scanvi(paths, in_memory):
    own = made(SCANVI, set_up(SCANVI, in_memory, **KEYS | LABELS))
    data = ScviDataModule(paths, **KEYS | LABELS, batch_size=32, seed=0)
    model = made(SCANVI, registry=data.registry, datamodule=data)
    assert model.n_labels == own.n_labels == 3
    labelled = np.flatnonzero(in_memory.obs["cell_type"] != UNLABELLED)
    every = rows_of(data, paths)
    again = rows_of(data, paths, 2, strategy=BlockShuffling(16, labelled))[: len(every)]
    expected = train(own, InMemory(own.adata_manager, [*zip(every, again, strict=True)]), 1)
    found = train(model, data, 1)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    predicted = model.predict(dataloader=data.inference_dataloader())
    assert set(predicted) <= {"B", "NK", "T"}
    np.testing.assert_array_equal(predicted, own.predict())


class TestScvi:
    @pytest.fixture(scope="class")
    def trained(self, paths, tmp_path_factory):
        data = ScviDataModule(paths, **BATCHES, labels_key="cell_type", batch_size=64, seed=0)
        model = made(SCVI, registry=data.registry)
        train(model, data, 2)
        path = tmp_path_factory.mktemp("model") / "model"
        model.save(path)
        return data, model, path, SCVI.load(path, adata=False, accelerator="cpu")

    @pytest.fixture
    def of_memory(self, trained, in_memory):
        return SCVI.load(trained[2], adata=in_memory.copy(), accelerator="cpu")

    def test_it_is_loaded_without_the_data(self, trained, of_memory):
        """And infers in the order of the collection."""
        data, model, _, loaded = trained
        for name in (
            "get_latent_representation",
            "get_normalized_expression",
            "get_elbo",
            "get_reconstruction_error",
            "get_likelihood_parameters",
        ):
            torch.manual_seed(0)
            found = getattr(loaded, name)(dataloader=data.inference_dataloader())
            torch.manual_seed(0)
            expected = getattr(of_memory, name)(batch_size=1024)
            if not isinstance(found, dict):
                found, expected = {name: found}, {name: np.asarray(expected)}
            for each, values in expected.items():
                np.testing.assert_allclose(found[each], values, rtol=1e-4, err_msg=name)
        some = [3, 5, 99, 100, 209]
        of_some = data.inference_dataloader(some, batch_size=N_CELLS)
        np.testing.assert_array_equal(
            model.get_latent_representation(dataloader=of_some),
            of_memory.get_latent_representation(indices=some),
        )
        with pytest.raises(AttributeError):  # it has no cells of its own
            loaded.get_latent_representation()

    def test_differential_expression_of_cells_that_are_read(self, trained, in_memory):
        data, _, path, _ = trained
        rows = np.arange(0, N_CELLS, 2)
        tables = []
        for adata in (data.anndata(rows, obs=["age"]), in_memory[rows].copy()):
            model = SCVI.load(path, adata=False, accelerator="cpu")
            np.random.seed(0)  # noqa: NPY002 - which scvi-tools draws cells with
            torch.manual_seed(0)
            table = model.differential_expression(
                adata, groupby="cell_type", group1="B", group2="T", silent=True
            )
            tables.append(table.sort_index())
            assert "age" in adata.obs
        pd.testing.assert_frame_equal(*tables)

    def test_cells_that_are_read_have_the_categories_of_a_copy(self, trained, in_memory):
        data = trained[0]
        for rows in (slice(0, 1), np.arange(0, N_CELLS, 3), [5, 3], slice(None)):
            read, copy = data.anndata(rows, obs=["is_male", "age"]), in_memory[rows].copy()
            for name in ("plate", "cell_type"):
                assert set(read.obs[name].cat.categories) == set(copy.obs[name].cat.categories)
                assert read.obs[name].tolist() == copy.obs[name].tolist()
            assert read.obs["is_male"].tolist() == copy.obs["is_male"].tolist()
            assert read.obs["age"].tolist() == copy.obs["age"].tolist()

    def test_differential_expression_by_a_loader(self, trained, in_memory):
        if "dataloader" not in inspect.signature(SCVI.differential_expression).parameters:
            pytest.skip("new in scvi-tools 1.5")
        data, _, _, loaded = trained
        rows = np.arange(0, N_CELLS, 2)
        table = loaded.differential_expression(
            dataloader=data.inference_dataloader(rows),
            groupby="cell_type", group1="B", group2="T", silent=True,
        )  # fmt: skip
        assert sorted(table.index) == sorted(in_memory.var_names)
        own = in_memory[rows]
        for name, label in (("raw_mean1", "B"), ("raw_mean2", "T")):
            means = own[own.obs["cell_type"] == label].layers["counts"].mean(axis=0).A1
            found = table.loc[in_memory.var_names, name]
            np.testing.assert_allclose(found, means, rtol=1e-5)

    def test_early_stopping_validates_on_the_second_part(self, paths):
        split = random_split(N_CELLS, [0.8, 0.2], seed=0)
        data = ScviDataModule(paths, batch_size=32, split=split)
        assert (data.n_obs, data.n_train, data.n_val) == (N_CELLS, 168, 42)
        seen = torch.cat([each["X"].sum(dim=1) for each in data.val_dataloader()])
        stored = open_collection(paths)[split[1]].X.sum(axis=1)
        np.testing.assert_allclose(seen, stored, rtol=1e-5)
        model = made(SCVI, registry=data.registry)
        train(model, data, 2, early_stopping=True)
        assert len(model.history["elbo_validation"]) == 2


class TestScanvi:
    def test_no_unlabelled_cell_counts_as_labelled(self, paths, in_memory):
        split = [range(100), range(100, 210)]
        data = ScviDataModule(paths, **KEYS | LABELS, batch_size=32, split=split)
        known = data.registry["field_registries"]["labels"]["state_registry"]
        unlabelled = [*known["categorical_mapping"]].index(UNLABELLED)
        loaders = data.train_dataloader(), data.val_dataloader()
        names = in_memory.obs["cell_type"]
        for loader, rows in zip(loaders, (names[:100], names[100:]), strict=True):
            pairs = [*loader]
            assert len(pairs) == len(loader)
            assert all((labelled["labels"] != unlabelled).all() for _, labelled in pairs)
            n = sum(int((every["labels"] == unlabelled).sum()) for every, _ in pairs)
            assert n == (rows == UNLABELLED).sum() > 0

    def test_cells_without_a_label_are_unlabelled(self, in_memory):
        adata = in_memory.copy()
        adata.obs["cell_type"] = adata.obs["cell_type"].cat.remove_categories([UNLABELLED])
        data = ScviDataModule(adata, **LABELS | {"unlabeled_category": "none"}, batch_size=64)
        model = made(SCANVI, registry=data.registry, datamodule=data)
        assert model.n_labels == 3
        assert (data.labels == "none").sum() == adata.obs["cell_type"].isna().sum() > 0
        train(model, data, 1)

    def test_from_a_model_that_was_trained_before(self, paths, tmp_path):
        before = ScviDataModule(paths, **BATCHES, batch_size=64)
        scvi_model = made(before.new_model)
        train(scvi_model, before, 1)
        data = ScviDataModule(paths, **BATCHES, **LABELS, batch_size=64)
        scvi_model.registry_ = data.registry
        model = SCANVI.from_scvi_model(scvi_model, UNLABELLED, datamodule=data)
        for name, values in scvi_model.module.state_dict().items():
            assert torch.equal(model.module.state_dict()[name], values)
        train(model, data, 1)
        predicted = model.predict(dataloader=data.inference_dataloader())
        model.save(tmp_path / "model")
        loaded = SCANVI.load(tmp_path / "model", data.anndata(range(60)))
        again = loaded.predict(dataloader=data.inference_dataloader())
        np.testing.assert_array_equal(again, predicted)


@pytest.mark.parametrize(("model", "keys"), SETUPS)
def test_any_model_is_loaded_with_few_cells_or_none(paths, in_memory, tmp_path, model, keys):
    data = ScviDataModule(paths, model, **keys, batch_size=70)
    made = data.new_model()
    made.is_trained_ = True
    made.module.eval()
    made.save(tmp_path / "model")
    few = False if model in (SCVI, MRVI) else data.anndata(range(60))
    loaded = model.load(tmp_path / "model", few)
    assert type(loaded) is model
    if model is SCANVI:
        own = SCANVI(set_up(SCANVI, in_memory, **keys), **SMALL)
        assert made.n_labels == own.n_labels
    adata = in_memory.copy()  # which it may be given later
    np.testing.assert_allclose(
        loaded.get_latent_representation(adata),
        made.get_latent_representation(dataloader=data.inference_dataloader()),
        rtol=1e-4,
        atol=1e-6,
    )


class TestOtherModels:
    @pytest.mark.parametrize("model", [SCVI, LinearSCVI])
    def test_priors_of_library_sizes(self, paths, in_memory, model):
        options = {"use_observed_lib_size": False} if model is SCVI else {}
        own = made(model, set_up(model, in_memory, **BATCHES), **options)
        loaded = ScviDataModule(paths, model, **BATCHES).new_model(**options)
        for name in ("library_log_means", "library_log_vars"):
            found, expected = (getattr(each.module, name) for each in (loaded, own))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_the_linear_decoder(self, paths, in_memory, tmp_path):
        data = ScviDataModule(paths, LinearSCVI, **BATCHES, batch_size=32)
        model, path = made(data.new_model), tmp_path / "model"
        train(model, data, 1)
        model.save(path)
        loaded = LinearSCVI.load(path, data.anndata(range(20)))
        np.testing.assert_array_equal(
            loaded.get_latent_representation(dataloader=data.inference_dataloader()),
            model.get_latent_representation(dataloader=data.inference_dataloader()),
        )
        assert loaded.get_loadings().shape == (N_GENES, SMALL["n_latent"])
        for each in (model, loaded):
            assert each.get_loadings().index.tolist() == in_memory.var_names.tolist()
        with pytest.raises((ValueError, AttributeError), match=r"zero-size|is_view"):
            model.get_latent_representation()  # it has no cells of its own

    def test_accessible_regions(self, paths, tmp_path):
        if "datamodule" not in inspect.signature(PEAKVI.train).parameters:
            pytest.skip("new in scvi-tools 1.5")
        data = ScviDataModule(paths, PEAKVI, **BATCHES, batch_size=70)
        model = data.new_model()
        train(model, data, 1, early_stopping=False)  # which is its default there
        model.save(tmp_path / "model")
        loader = data.inference_dataloader()
        latent = model.get_latent_representation(dataloader=loader)
        assert len(latent) == N_CELLS
        loaded = PEAKVI.load(tmp_path / "model", data.anndata(range(60)))
        again = loaded.get_latent_representation(dataloader=loader)
        np.testing.assert_array_equal(again, latent)

    def test_samples_and_their_effects(self, paths, in_memory):
        keys = BATCHES | {"sample_key": "donor"}
        own = MRVI(set_up(MRVI, in_memory, **keys))
        data = ScviDataModule(paths, MRVI, **keys, batch_size=70)
        model = MRVI(registry=data.registry)
        assert torch.equal(model.n_obs_per_sample, own.n_obs_per_sample)
        train(model, data, 1)
        latent = model.get_latent_representation(dataloader=data.inference_dataloader())
        assert latent.shape[0] == N_CELLS


@pytest.mark.slow
def test_cells_that_are_read_are_mapped_onto_a_reference(paths, in_memory, tmp_path):
    data = ScviDataModule(paths, **BATCHES, batch_size=64)
    reference = made(data.new_model)
    train(reference, data, 1)
    reference.save(tmp_path / "reference")
    adata = cells(90, seed=1, plates=("p9", "p2"))[:, ::-1].copy()  # in another order
    adata.write_h5ad(tmp_path / "query.h5ad")
    read = ScviDataModule(tmp_path / "query.h5ad", **BATCHES).anndata(slice(None))
    latent = []
    for query in (read, adata):
        SCVI.prepare_query_anndata(query, str(tmp_path / "reference"))
        scvi.settings.seed = 0
        mapped = SCVI.load_query_data(query, str(tmp_path / "reference"), accelerator="cpu")
        assert mapped.summary_stats.n_batch == 4
        mapped.train(1, plan_kwargs={"weight_decay": 0.0}, **TRAINING)
        latent.append(mapped.get_latent_representation())
    np.testing.assert_allclose(latent[0], latent[1], rtol=1e-5)


@pytest.mark.parametrize("keys", [{}, {"labels_key": "cell_type", "unlabeled_category": "B"}])
class TestResume:
    @pytest.mark.slow
    @pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
    def test_lightning_goes_on_exactly(self, paths, tmp_path, keys, num_workers):
        def fit(watching, checkpoint=None):
            data = ScviDataModule(paths, **keys, batch_size=32, num_workers=num_workers)
            model = made(data.new_model)
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                train(model, data, 3, watching=watching, ckpt_path=checkpoint)
            return watching

        whole = fit(Watching())
        assert len(whole.sums) == 21
        # With workers, how each place is restored is tested with Lightning alone.
        for n in (17,) if num_workers else (3, 7, 17):
            path = tmp_path / f"{n}.ckpt"
            before = fit(Watching(path, n))
            after = fit(Watching(), path)
            assert before.sums + after.sums == whole.sums
            np.testing.assert_allclose(before.losses + after.losses, whole.losses, rtol=1e-5)

    def test_by_hand(self, paths, keys):
        def sums(loader):
            return [first_of(each)["X"].sum(dim=1).tolist() for each in loader]

        whole = sums(ScviDataModule(paths, **keys, batch_size=32).train_dataloader())
        data = ScviDataModule(paths, **keys, batch_size=32)
        minibatches = iter(data.train_dataloader())
        for _ in range(4):
            next(minibatches)
        state = json.loads(json.dumps(data.state_dict()))
        other = ScviDataModule(paths, **keys, batch_size=32)
        other.load_state_dict(state)
        assert sums(other.train_dataloader()) == whole[4:]
        none: Any = None
        for damaged in (dict[str, Any](), {"train": dict[str, Any]()}, none):
            with pytest.raises(StateError, match="state"):
                other.load_state_dict(damaged)


class TestSettings:
    def test_those_of_autotune(self, paths, tmp_path):
        sizes = {"block_size": 8, "fetch_factor": 2, "num_workers": 1, "batch_size": 30}
        result = {"schema": "cellfeed.autotune/4", "dataset": {"batch_size": 30}}
        result |= {"recommended": {"configuration": sizes}}
        (tmp_path / "autotune.json").write_text(json.dumps(result))
        split = [np.arange(0, 200, 2), np.arange(1, 200, 2)]
        data = ScviDataModule(paths, autotune=tmp_path / "autotune.json", split=split)
        assert (data.dataset.batch_size, data.dataset.fetch_factor) == (30, 2)
        assert data.dataset.strategy.block_size == 8  # type: ignore[attr-defined]
        assert data.train_dataloader().num_workers == 1
        assert data.n_train == 100
        scvi.settings.seed = 7
        assert ScviDataModule(paths).dataset.seed == 7
        assert ScviDataModule(paths, seed=3).dataset.seed == 3

    def test_a_strategy_gets_the_rows_of_the_split(self, paths):
        data = ScviDataModule(paths, strategy=BlockShuffling(4), split=[range(50), range(50, 60)])
        assert data.dataset.strategy.block_size == 4  # type: ignore[attr-defined]
        assert (data.n_train, data.n_val) == (50, 10)
        strategy = BlockShuffling(4, indices=range(70))
        assert ScviDataModule(paths, strategy=strategy).n_train == 70
        with pytest.raises(ParameterError, match="cannot be combined"):
            ScviDataModule(paths, strategy=strategy, split=[range(50)])

    @pytest.mark.parametrize("batch_size", [11, 10, 209, 500])
    def test_no_minibatch_of_one_cell(self, paths, batch_size):
        loader = ScviDataModule(paths, batch_size=batch_size).train_dataloader()
        sizes = [len(each["X"]) for each in loader]
        assert len(sizes) == -(-N_CELLS // batch_size) - (N_CELLS % batch_size == 1)
        assert min(sizes) > 1

    @pytest.mark.parametrize("keys", [{}, {"labels_key": "cell_type", "unlabeled_category": "B"}])
    def test_how_long_the_training_waited(self, paths, keys):
        data = ScviDataModule(paths, **keys, batch_size=32)
        train(made(data.new_model), data, 2)
        done = data.statistics()
        assert done.n_minibatches == (28 if keys else 14)
        assert 0 < done.waiting_share < 1


MISTAKES = [
    ({"batch_key": "plte"}, ColumnError, "obs has no column 'plte'"),
    ({"layer": "count"}, Exception, "layers/count"),
    ({"sample_key": "donor"}, ParameterError, "SCVI takes no `sample_key`; leave it out"),
    ({"size_factor_key": "plate"}, ColumnError, "'plate' is text, where scvi-tools needs numbers"),
    ({"continuous_covariate_keys": ["age", "plate"]}, ColumnError, "'plate' is text, where"),
    ({"model": SCANVI}, ParameterError, "SCANVI needs `labels_key`; give it"),
    ({"unlabeled_category": "a"}, ParameterError, "SCANVI needs `labels_key`; give it"),
    ({"dense": False}, ParameterError, "`dense` is chosen for scvi-tools; leave it out"),
    ({"batch_size": 1}, ParameterError, "`batch_size >= 2` must hold, but got batch_size=1"),
    ({"split": [[7], [8, 9]]}, ParameterError, "a rank has a single cell to train on"),
    ({"split": np.arange(5)}, ParameterError, "`split` must be arrays of rows"),
    (
        {"categorical_covariate_keys": "donor"},
        ParameterError,
        r"`categorical_covariate_keys` must be a list .* got the text 'donor'; write \['donor'\]",
    ),
    (
        {"continuous_covariate_keys": {"age", "score"}},
        ParameterError,
        "`continuous_covariate_keys` must be a list of names, but got a set, which has no order",
    ),
]


class TestMistakes:
    @pytest.mark.parametrize(("options", "error", "told"), MISTAKES)
    def test_arguments(self, paths, options, error, told):
        with pytest.raises(error, match=told) as raised:
            ScviDataModule(paths, **options)
        assert "\n" not in str(raised.value)

    def test_a_collection_that_was_opened_without_what_is_needed(self, paths):
        with pytest.raises(ColumnError, match="'plate' was not opened"):
            ScviDataModule(open_collection(paths), batch_key="plate")
        with pytest.raises(ParameterError, match=r"elements=\['layers/counts'\]"):
            ScviDataModule(open_collection(paths), layer="counts")

    @pytest.mark.parametrize(("name", "key"), [("plate", "batch_key"), ("size", "size_factor_key")])
    def test_cells_without_a_value(self, in_memory, name, key):
        adata = in_memory.copy()
        adata.obs["size"] = adata.obs["n_counts"]
        adata.obs.iloc[[5, 17], [adata.obs.columns.get_loc(name)]] = np.nan
        told = f"'{name}' has no value for 2 of 210 cells, such as row 5; leave these cells out"
        with pytest.raises(ColumnError, match=told):
            ScviDataModule(adata, **{key: name})
        rows = np.setdiff1d(np.arange(N_CELLS), [5, 17])
        data = ScviDataModule(adata, **{key: name}, split=[rows])
        model = made(SCVI, registry=data.registry)
        train(model, data, 1)
        with pytest.raises(ColumnError, match=told):
            data.inference_dataloader()
        found = model.get_latent_representation(dataloader=data.inference_dataloader(rows))
        assert len(found) == 208

    def test_others(self, paths):
        with pytest.raises(ParameterError, match="`rows` must be ascending"):
            ScviDataModule(paths).inference_dataloader([3, 1])
        with pytest.warns(UserWarning, match="does not contain unnormalized count data"):
            ScviDataModule(paths)
        with pytest.raises(ParameterError, match="use another model"):
            ScviDataModule(paths, scvi.model.TOTALVI, layer="counts")
