"""`verify` names what is damaged in files and stores, and nothing else."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import settings
from tests import commands
from tests.loader.zarr_stores import in_this_thread

from cellfeed import (
    CellDataset,
    CellfeedError,
    ParameterError,
    PathError,
    ReadOptions,
    Streaming,
    open_collection,
    preshuffle,
    verify,
)
from cellfeed.bytes import _tables

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Consolidated metadata is currently not part",
        "ignore:Writing zarr v2 data will no longer be the default",
        "ignore:Numcodecs codecs are not in",
        "ignore:zarr v3 autosharding will be the default",
    ),
]

N = 24


@pytest.fixture(autouse=True)
def _quickly():
    with in_this_thread():
        yield


def cells() -> ad.AnnData:
    """Return cells with an element of every kind that preshuffle writes."""
    random = np.random.default_rng(0)
    X = sp.csr_matrix(random.poisson(0.5, (N, 9)).astype(np.float32))
    obs = pd.DataFrame(
        {
            "line": pd.Categorical(random.choice(["A", "B"], N)),
            "depth": np.arange(N),
            "note": [f"note {k}" for k in range(N)],
            "age": pd.array([1, None] * (N // 2), dtype="Int64"),
        },
        index=[f"cell{k}" for k in range(N)],
    )
    obsm = {"X_pca": random.random((N, 3))}
    uns = {"title": "a text", "n": 3, "names": np.array(["a", "b"]), "by": {"mean": np.arange(3.0)}}
    return ad.AnnData(X, obs, layers={"log": np.log1p(X.toarray())}, obsm=obsm, uns=uns)


def flipped(file: Path, random: np.random.Generator) -> bytes:
    """Return the content of a file with one bit flipped."""
    content = bytearray(file.read_bytes())
    content[random.integers(len(content))] ^= 1 << int(random.integers(8))
    return bytes(content)


def content(store: Path) -> list[Any]:
    """Return what cellfeed reads of the first cells, their obs and the genes."""
    obs = ["line", "depth", "note", "age"]
    collection = open_collection(store, elements=["X", "layers/log", "obsm/X_pca"], obs=obs)
    options = ReadOptions(verify="always", num_threads=1)
    dataset = CellDataset(
        collection, Streaming(), batch_size=N, as_torch=False, read_options=options
    )
    (minibatch,) = dataset
    X = minibatch.X
    of_obs = [np.asarray(minibatch.obs[name]).astype(str).tolist() for name in obs]
    arrays = [X.indptr, X.indices, X.data, minibatch["layers/log"], minibatch["obsm/X_pca"]]
    return [[*map(str, collection.var_names)], *of_obs, *(each.tolist() for each in arrays)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["delta", "annbatch"])
def test_no_flipped_bit_of_a_copy_gives_other_values_in_silence(tmp_path, codec):
    """Those of chunks are reported; those of metadata, if the store has a copy of them."""
    cells().write_h5ad(tmp_path / "cells.h5ad")
    store, random = tmp_path / "copy.zarr", np.random.default_rng(1)
    preshuffle(tmp_path / "cells.h5ad", store, elements="all", codec=codec, cells_per_chunk=5)
    expected = content(store)
    assert verify(store).damage == ()
    assert not verify(store).without_checksums
    files = [each for each in sorted(store.rglob("*")) if each.is_file()]
    chunks = [each for each in files if each.name != "zarr.json"]
    for k in range(settings().max_examples):
        file = (files if k % 3 else chunks)[random.integers(len(files if k % 3 else chunks))]
        before = file.read_bytes()
        file.write_bytes(flipped(file, random))
        try:
            is_same = content(store) == expected
        except CellfeedError:
            is_same = None
        damage = verify(store).damage
        if file.name != "zarr.json":
            assert is_same is not False
            assert damage
            assert str(file.relative_to(store).parents[-2]) in damage[0]
        elif file.parent != store:
            assert bool(damage) == (parsed(file.read_bytes()) != parsed(before))
        file.write_bytes(before)
    assert verify(store).damage == ()


def parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


# Files and stores that are whole


def write_mudata(path: Path) -> None:
    with h5py.File(path, "w") as file:
        modalities = file.create_group("mod")
        for modality in ("rna", "atac"):
            ad.io.write_elem(modalities, modality, cells())
        file.attrs["encoding-type"] = "MuData"
        ad.io.write_elem(file, "obs", cells().obs)
        ad.io.write_elem(file, "var", pd.DataFrame(index=["g"]))


def write_by_gene(path: Path) -> None:
    adata = cells()
    adata.X = sp.csc_matrix(adata.X)
    adata.obsp["near"] = sp.eye(N, format="csr")
    adata.write_h5ad(path)


def write_zarr(path: Path, zarr_format: Any) -> None:
    with ad.settings.override(zarr_write_format=zarr_format):
        cells().write_zarr(path)


WHOLE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "gzip": ("a.h5ad", lambda path: cells().write_h5ad(path, compression="gzip")),
    "plain": ("a.h5ad", lambda path: cells().write_h5ad(path)),
    "by gene": ("a.h5ad", write_by_gene),
    "MuData": ("a.h5mu", write_mudata),
    "zarr 2": ("a.zarr", lambda path: write_zarr(path, 2)),
    "zarr 3": ("a.zarr", lambda path: write_zarr(path, 3)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that copies a whole file or store, written once, into a folder."""
    folders = dict[str, Path]()

    def copied(name: str, folder: Path) -> Path:
        file, write = WHOLE[name]
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("whole")
            write(folders[name] / file)
        shutil.copytree(folders[name], folder, dirs_exist_ok=True)
        return folder / file

    return copied


def arrays_of(path: Path) -> set[str]:
    """Return the names of all arrays, found by h5py and zarr."""
    if path.is_dir():
        group = zarr.open_group(path, mode="r")
        return {name for name, each in group.members(None) if isinstance(each, zarr.Array)}
    found = set[str]()
    with h5py.File(path) as file:
        file.visititems(lambda name, each: found.add(name) if hasattr(each, "dtype") else None)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_damaged(whole, tmp_path, name):
    path, progress = whole(name, tmp_path), list[tuple[float, float]]()
    found = verify(path, on_progress=lambda *each: progress.append(each))
    assert found.damage == ()
    names = arrays_of(path)
    assert found.n_arrays == len(names)
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1] > 0
    without = set(found.without_checksums.get(str(path), ()))
    assert without <= names
    assert any(each.endswith("X/data") for each in without) == (name != "gzip")


# Damage


def in_file(damage: Callable[[h5py.File], Any]) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            damage(file)

    return change


def put(name: str, place: int, value: float) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[name][place] = value

    return change


def flip_chunk(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with h5py.File(path) as file:
            chunk = file[name].id.get_chunk_info(0)
        content = bytearray(path.read_bytes())
        content[chunk.byte_offset + chunk.size // 2] ^= 8
        path.write_bytes(content)

    return change


def shrink(file: h5py.File) -> None:
    data = file["X/data"][:-1]
    del file["X/data"]
    file["X/data"] = data


def texts(store: Path) -> Path:
    """Return the first chunk of texts, which are in a group where pandas has a dtype for them."""
    return next((store / "obs/note").rglob("c/0"))


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "chunk of values": ("gzip", flip_chunk("X/data"), r"`X/data`, elements 0 to \d+ \(bytes "),
    "chunk of indices": ("gzip", flip_chunk("X/indices"), r"`X/indices`, elements 0 to \d+ \(byt"),
    "chunk of a dense layer": ("gzip", flip_chunk("layers/log"), "`layers/log`, rows 0 to"),
    "chunk of obs": ("gzip", flip_chunk("obs/depth"), "`obs/depth`, elements 0 to"),
    "column": ("plain", in_file(put("X/indices", 3, 9)), "`X/indices`.* column index outside"),
    "row": ("by gene", in_file(put("X/indices", 3, N)), "`X/indices`.* column index outside"),
    "neighbour": ("by gene", in_file(put("obsp/near/indices", 0, N)), "`obsp/near/indices`.* col"),
    "pointers": ("plain", in_file(put("X/indptr", 3, 10_000)), "`X/indptr` does not fit"),
    "values": ("plain", in_file(shrink), "`X/indptr` does not fit"),
    "cut": ("gzip", lambda path: path.write_bytes(path.read_bytes()[:-500]), "truncated"),
    "chunk of zarr 2": (
        "zarr 2",
        lambda path: (path / "X/data/0").write_bytes(b"\x02\x01\x33\x04"),
        "`X/data`, elements 0 to ",
    ),
    "chunk of texts": (
        "zarr 3",
        lambda path: texts(path).write_bytes(b"\x02\x01\x33\x04"),
        rf"`obs/note[^`]*`, rows 0 to {N} cannot be read",
    ),
    "link of a chunk": (
        "zarr 3",
        lambda path: lose(path / "X/data/c/0"),
        "`X/data`, elements 0 to|X/data/c/0: is a link to nowhere",
    ),
    "link of texts": ("zarr 3", lambda path: lose(texts(path)), "obs/note.*/c/0: "),
    "no values": ("zarr 3", lambda path: (path / "X/data/c/0").unlink(), "are missing"),
    "no metadata": ("zarr 3", lambda path: (path / "X/data/zarr.json").unlink(), "is missing"),
    "no metadata of zarr 2": (
        "zarr 2",
        lambda path: (path / "obs/depth/.zarray").unlink(),
        r"obs/depth/\.zarray: is missing",
    ),
    "other metadata": (
        "zarr 3",
        lambda path: replace(path / "obs/line/zarr.json", "categorical", "numeric"),
        r"obs/line/zarr\.json: differs from its consolidated copy",
    ),
    "metadata": (
        "zarr 3",
        lambda path: (path / "X/data/zarr.json").write_text("{"),
        "`X/data` cannot be read",
    ),
}


def lose(file: Path) -> None:
    """Replace a file by a link that leads nowhere."""
    file.unlink()
    file.symlink_to("nowhere")


def replace(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named(whole, tmp_path, name):
    kind, damage, said = DAMAGES[name]
    path = whole(kind, tmp_path)
    damage(path)
    (found,) = verify([path]).damage
    assert found.startswith(str(path))
    assert "\n" not in found
    assert re.search(said, found)


def test_every_damaged_chunk_is_named(tmp_path):
    cells().write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        values = file["X/data"][:]
        del file["X/data"]
        file.create_dataset("X/data", data=values, chunks=(8,), compression="gzip")
    with h5py.File(tmp_path / "a.h5ad") as file:
        chunks = [file["X/data"].id.get_chunk_info(k) for k in (1, 4, 5)]
    content = bytearray((tmp_path / "a.h5ad").read_bytes())
    for chunk in chunks:
        content[chunk.byte_offset + chunk.size // 2] ^= 8
    (tmp_path / "a.h5ad").write_bytes(content)
    damage = verify(tmp_path / "a.h5ad").damage
    starts = [int(re.findall(r"elements (\d+) to", each)[0]) for each in damage]
    assert starts == [each.chunk_offset[0] for each in chunks]


def test_nothing_is_taken_from_the_cache(tmp_path, monkeypatch):
    """The index of a shard, which opening the store has cached, is read again."""
    monkeypatch.setattr(_tables, "_FEWEST_ENTRIES", 1)
    write_zarr(tmp_path / "a.zarr", 3)
    root: Any = zarr.open_group(tmp_path / "a.zarr", mode="r+", use_consolidated=False)
    values = root["X/data"][:]
    root.create_array("X/data", data=values, chunks=(8,), shards=(800,), overwrite=True)
    zarr.consolidate_metadata(tmp_path / "a.zarr")
    shard = tmp_path / "a.zarr/X/data/c/0"
    for each in [*(tmp_path / "a.zarr").rglob("*"), shard]:
        os.utime(each, ns=(0, 0))
    open_collection(tmp_path / "a.zarr")[:]
    assert verify(tmp_path / "a.zarr").damage == ()
    content = bytearray(shard.read_bytes())
    content[-10] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(0, 0))
    (damage,) = verify(tmp_path / "a.zarr").damage
    assert "`X/data`, index of the shard" in damage


def test_what_cannot_be_verified(tmp_path):
    with pytest.raises(ParameterError, match="`verify` reads local files"):
        verify("https://example.org/cells.h5ad")
    with pytest.raises(PathError, match="no such file"):
        verify(tmp_path / "none.h5ad")
    cells().write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(ParameterError, match="`num_threads >= 1` must hold"):
        verify(tmp_path / "a.h5ad", num_threads=0)


def test_the_command(tmp_path):
    cells().write_h5ad(tmp_path / "a.h5ad", compression="gzip")
    whole = commands.cellfeed("verify", tmp_path / "a.h5ad")
    assert (whole.exit_code, whole.stderr) == (0, "")
    of_texts, summary = whole.stdout.splitlines()
    assert of_texts.startswith(f"{tmp_path / 'a.h5ad'}: ")
    assert "have no checksum, so that only decompression and structure were checked: " in of_texts
    assert "obs/note" in of_texts
    assert summary.endswith(": nothing damaged")
    flip_chunk("X/data")(tmp_path / "a.h5ad")
    damaged = commands.cellfeed("verify", tmp_path / "a.h5ad")
    assert (damaged.exit_code, damaged.stderr) == (1, "")
    assert damaged.stdout.startswith(f"{tmp_path / 'a.h5ad'}: `X/data`, elements 0 to ")
    assert damaged.stdout.endswith(": 1 damaged\n")
    mistaken = commands.cellfeed("verify", tmp_path / "none.h5ad")
    assert (mistaken.exit_code, mistaken.stdout) == (2, "")
