"""`preshuffle` beside annbatch, which has an environment of its own: what it reads and writes."""

import json
import os
import re
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.preshuffling.test_preshuffle import parts_of

from cellfeed import open_collection, preshuffle

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.usefixtures("zarr_in_this_thread")]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".peers" / "annbatch" / "bin" / "python"
TABLE = (ROOT / "docs/how-to/preshuffle.md").read_text().partition("## Beside annbatch")[2]
ROWS = re.findall(r"^\| (.+?) \|", TABLE, re.MULTILINE)[2:]
TESTED = list[str]()


def rows(*starts: str) -> Any:
    """Mark a test with the rows of the table that it tries, by how they start."""
    TESTED.extend(starts)
    return lambda test: test


def test_every_row_is_tried_once():
    found = {row: [start for start in TESTED if row.startswith(start)] for row in ROWS}
    assert {row: len(starts) for row, starts in found.items()} == dict.fromkeys(ROWS, 1)


@pytest.fixture(scope="module")
def interpreter() -> Path:
    """That of the environment of annbatch."""
    path = Path(os.environ.get("CELLFEED_ANNBATCH_PYTHON", PYTHON))
    if not path.exists():
        pytest.skip(f"no annbatch: neither CELLFEED_ANNBATCH_PYTHON is set nor is {PYTHON} there")
    return path


def run_annbatch(interpreter: Path, script: str, *arguments: object) -> Any:
    """Run a script in the environment of annbatch, and return what it prints last."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    running = subprocess.run(
        [interpreter, "-W", "ignore", "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=False, env=own,
    )  # fmt: skip
    assert running.returncode == 0, running.stderr
    return json.loads(running.stdout.splitlines()[-1])


# What annbatch and its anndata read of our stores.

READ = """
import json, sys
import anndata, annbatch, numpy, zarr
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})

def layer(group):
    X = anndata.io.sparse_dataset(group["layers"]["twice"])
    return anndata.AnnData(X=X, obs=anndata.io.read_elem(group["obs"]))

def listed(X, obs):
    sums = numpy.asarray(X.sum(axis=1)).ravel()
    return [[str(file), int(row), float(sum)] for file, row, sum in
            zip(obs["source_file"], obs["source_row"], sums)]

found = {}
for path in sys.argv[1:]:
    collection = annbatch.DatasetCollection(path, mode="r")
    assert not collection.is_empty
    found[path] = {"n_obs": len(collection.obs()), "anndata": []}
    for key, group in zarr.open_group(path, mode="r").groups():
        part = anndata.io.read_elem(group)
        found[path]["anndata"] += listed(part.X, part.obs)
    for name, options in {"X": {}, "layer": {"load_adata": layer}}.items():
        loader = annbatch.Loader(batch_size=64, chunk_size=16, preload_nchunks=8, shuffle=True,
                                 to=None, preload_to_gpu=False)
        batches = loader.use_collection(collection, **options)
        found[path][name] = [row for each in batches for row in listed(each["X"], each["obs"])]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def plates(new_folder) -> list[Path]:
    rng, folder = np.random.default_rng(0), new_folder()
    paths = []
    for k, n_cells in enumerate((600, 500, 300)):
        X = sp.csr_matrix(rng.poisson(0.3, (n_cells, 50)).astype(np.float32))
        obs = pd.DataFrame({"kind": pd.Categorical(rng.choice(list("abc"[: k + 1]), n_cells))})
        obs.index = [f"{k}-{row}" for row in range(n_cells)]
        adata = ad.AnnData(X, obs, layers={"twice": sp.csc_matrix(2 * X)})
        adata.write_h5ad(folder / f"{k}.h5ad")
        paths.append(folder / f"{k}.h5ad")
    return paths


@pytest.fixture(scope="module")
def stores(interpreter, plates, new_folder) -> dict[str, Path]:
    """Stores of these cells, by how they were written."""
    folder = new_folder()
    names = ["whole", "delta", "appended", "mixed", "grouped"]
    paths = {name: folder / f"{name}.zarr" for name in names}
    options: dict[str, Any] = {"elements": ["X", "layers/twice"], "memory": 200_000}
    for name, path in paths.items():
        codec: Any = "delta" if name == "delta" else "annbatch"
        by: Any = "kind" if name == "grouped" else None
        first = plates[:2] if name in ("appended", "mixed") else plates
        preshuffle(first, path, codec=codec, group_by=by, **options)
    preshuffle(plates[2], paths["appended"], append=True, memory=200_000)
    preshuffle(plates[2], paths["mixed"], append=True, mix=1, memory=200_000)
    return paths


@pytest.fixture(scope="module")
def found(interpreter, stores):
    return run_annbatch(interpreter, READ, *stores.values())


@pytest.mark.parametrize("name", ["whole", "delta", "appended", "mixed", "grouped"])
def test_annbatch_and_anndata_read_it(plates, stores, found, name):
    matrices = [ad.read_h5ad(path).X for path in plates]
    expected = [
        (f"{k}.h5ad", row, float(total))
        for k, X in enumerate(matrices)
        for row, total in enumerate(np.asarray(X.sum(axis=1)).ravel())
    ]
    of_store = found[str(stores[name])]
    assert of_store["n_obs"] == len(expected)
    for each in ("X", "anndata"):
        assert sorted(map(tuple, of_store[each])) == expected
    twice = [(file, row, total / 2) for file, row, total in of_store["layer"]]
    assert sorted(twice) == expected


# Both write the same.

WRITE = """
import json, sys
import anndata, annbatch

def layer(path):
    found = anndata.experimental.read_lazy(path)
    return anndata.AnnData(found.layers["twice"], found.obs.to_memory(), found.var.to_memory())

for out, calls in json.loads(sys.argv[1]):
    for paths, options in calls:
        if options.pop("layer", False):
            options["load_adata"] = layer
        annbatch.DatasetCollection(out).add_adatas(
            paths, **({"shuffle_chunk_size": 10, "n_obs_per_chunk": 16} | options))
print("null")
"""
GENES = list("abcd"), list("dbe")
BOTH, OUTER = [0, 1], {"join_vars": "outer"}
SMALL = {"memory": 15_000}
# By name: what annbatch is called with, and what we are, each with numbers of files.
WRITTEN: dict[str, tuple[list[Any], list[Any]]] = {
    "in order": ([(BOTH, {"shuffle": False})], [(BOTH, OUTER | {"in_order": True})]),
    "joined": ([(BOTH, {"dataset_size": 20})], [(BOTH, OUTER | SMALL)]),
    "genes": ([(BOTH, {"var_subset": ["b", "d"]})], [(BOTH, {"genes": ["b", "d"]})]),
    "layer": ([(BOTH, {"layer": True})], [(BOTH, OUTER | {"element": "layers/twice"})]),
    "grouped": ([(BOTH, {"groupby": "kind"})], [(BOTH, OUTER | {"group_by": "kind"})]),
    "added": (
        [([0], {"dataset_size": 15}), ([1], {})],
        [([0], SMALL), ([1], OUTER | {"append": True, "mix": 1} | SMALL)],
    ),
}


@pytest.fixture(scope="module")
def adatas() -> list[ad.AnnData]:
    rng, made = np.random.default_rng(0), []
    for k, (n_cells, genes) in enumerate(zip((30, 25), GENES, strict=True)):
        X = sp.csr_matrix(rng.poisson(1, (n_cells, len(genes))).astype(np.float32))
        obs = pd.DataFrame({"kind": pd.Categorical(rng.choice(["u", "v"], n_cells))})
        obs.index = [f"cell{row}" for row in range(n_cells)]  # the same in both
        var = pd.DataFrame({"file": k}, index=genes)
        made.append(ad.AnnData(X, obs, var, layers={"twice": 2 * X}))
    return made


@pytest.fixture(scope="module")
def written(interpreter, adatas, new_folder) -> dict[str, tuple[Path, Path]]:
    """Stores of annbatch and ours."""
    folder, files = new_folder(), list[Path]()
    for k, adata in enumerate(adatas):
        files.append(folder / f"{k}.h5ad")
        adata.write_h5ad(files[-1])
    stores = {name: (folder / f"{name} theirs.zarr", folder / f"{name}.zarr") for name in WRITTEN}
    calls = [
        (str(stores[name][0]), [([str(files[k]) for k in of], each) for of, each in theirs])
        for name, (theirs, _) in WRITTEN.items()
    ]
    run_annbatch(interpreter, WRITE, json.dumps(calls))
    for name, (_, ours) in WRITTEN.items():
        for of, options in ours:
            settings: dict[str, Any] = {"codec": "annbatch", "cells_per_chunk": 16} | options
            if "append" in options:
                settings.pop("codec")
            elif "element" not in options:
                settings["elements"] = ["X"]
            preshuffle([files[k] for k in of], stores[name][1], **settings)
    return stores


@rows(
    "`adata_paths`", "`load_adata`", "genes are joined", "`var_subset`", "`shuffle=False`",
    "`shuffle_chunk_size", "`dataset_size", "called again, it merges", "called again, other genes",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Observation names are not unique")
@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_cells(written, name):
    genes = {"genes": ["b", "d"], "added": GENES[0]}.get(name, list("abcde"))
    found = []
    for store in written[name]:
        cells = open_collection(store, genes=genes)
        names = [each.partition("-")[0] for each in cells.obs_names(slice(None))]
        values = cells[:].X.toarray().tolist()
        here = [(name, *each) for name, each in zip(names, values, strict=True)]
        found.append(here if name == "in order" else sorted(here))
        assert len(parts_of(store)) > (name == "joined")
    assert found[0] == found[1]


@rows("`groupby`")
def test_groups(written):
    for store in written["grouped"]:
        for part in parts_of(store):
            assert [kind for kind, _ in groupby(part.obs["kind"])] == ["u", "v"]


@rows("`n_obs_per_chunk", "`zarr_compressor`", "`shard_size", "`h5ad_compressor`")
def test_chunks_and_codecs(written):
    chunks, codecs = [], []
    for store in written["in order"]:
        for name in ("data", "indices"):
            array = json.loads((store / "dataset_0" / "X" / name / "zarr.json").read_text())
            [shard] = array["codecs"]
            chunks.append(shard["configuration"]["chunk_shape"])
            codecs.append(shard["configuration"]["codecs"])
            assert array["chunk_grid"]["configuration"]["chunk_shape"][0] >= chunks[-1][0]
    np.testing.assert_allclose(chunks[:2], chunks[2:], atol=1)
    assert codecs[:2] == codecs[2:]


@rows("`src_path`", "`obs_names_make_unique`", "`merge`")
def test_tables(written, adatas):
    theirs, ours = (parts_of(store)[0] for store in written["in order"])
    assert list(theirs.obs["src_path"].astype(str).map(lambda path: Path(path).name)) == list(
        ours.obs["source_file"].astype(str)
    )
    names = [name for each in adatas for name in each.obs_names]
    assert list(ours.obs_names) == names
    assert theirs.obs_names.is_unique
    assert "file" not in theirs.var
    assert ours.var["file"].to_dict() == dict(zip("abcde", [0, 0, 0, 0, 1], strict=True))


@rows("`rng`", "a run that was stopped")
def test_seeds_and_runs_again(adatas, tmp_path):
    path, order = tmp_path / "cells.h5ad", []
    adatas[0].write_h5ad(path)
    for k, seed in enumerate((1, 1, 2)):
        preshuffle(path, tmp_path / f"{k}.zarr", seed=seed)
        order.append(list(parts_of(tmp_path / f"{k}.zarr")[0].obs["source_row"]))
    assert order[0] == order[1] != order[2]
    assert preshuffle(path, tmp_path / "0.zarr", seed=1).n_parts_written == 0
