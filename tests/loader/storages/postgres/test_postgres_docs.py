"""docs/how-to/postgres.md runs as it stands, and its layout is what is written."""

import re
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numcodecs import Zstd

pytestmark = pytest.mark.server
TEXT = (Path(__file__).parents[4] / "docs" / "how-to" / "postgres.md").read_text()


@pytest.fixture(scope="module")
def stored(tmp_path_factory, postgres_server):
    random = np.random.default_rng(0)
    X = np.round(random.random((300, 500)) * 400) * (random.random((300, 500)) < 0.3)
    X[7] /= 3
    plates = pd.Categorical(["plate01"] * 200 + ["plate02"] * 100)
    obs = pd.DataFrame({"plate": plates}, index=[f"cell {k}" for k in range(300)])
    X = X.astype(np.float32)
    path = tmp_path_factory.mktemp("docs") / "cells.h5ad"
    ad.AnnData(sp.csr_matrix(X), obs=obs, layers={"counts": X}).write_h5ad(path)
    return postgres_server.load(path, "documented", elements=["X", "layers/counts"]), X


@pytest.mark.docs
def test_the_example(stored, postgres_server, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    _, code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    found: dict[str, Any] = {}
    code = code.replace("postgresql://me@host/cells?collection=plates", stored[0])
    exec(compile(code, "docs/how-to/postgres.md", "exec"), found)
    rows = np.concatenate([each.rows for each in found["dataset"]])
    assert sorted(rows.tolist()) == list(range(300))
    assert len(found["collection"]) == 180


@pytest.mark.docs
def test_the_metadata(stored, postgres_server):
    rows = postgres_server.ask("SELECT key FROM documented.cellfeed")
    table = TEXT.split("The keys of `cellfeed`:")[1].split("A packed row")[0]
    first = " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))
    told = set(re.findall(r"`([^`]+)`", first))
    assert {key for (key,) in rows} == told - {"genes/raw/var"}


def unpacked(packed, n_columns, width, dtype):
    """A packed row, by what the page says; columns take ``width`` bytes."""
    content = np.frombuffer(Zstd().decode(packed), np.uint8)
    kind = np.dtype("u1") if content[0] else dtype
    n = (content.size - 1) // (width + kind.itemsize)

    def joined(planes, name):
        return np.ascontiguousarray(planes.reshape(-1, n).T).view(name).ravel()

    values = joined(content[1 + n * width :], kind).astype(dtype)
    if not width:
        return values
    row = np.zeros(n_columns, dtype)
    row[np.cumsum(joined(content[1 : 1 + n * width], f"<u{width}").astype(np.int64))] = values
    return row


def test_packed_rows(stored, postgres_server):
    query = 'SELECT id, "X", "layers/counts" FROM documented.packed ORDER BY id'
    rows = postgres_server.ask(query)
    assert [number for number, *_ in rows] == list(range(300))
    for number, *packed in rows:
        for each, width in zip(packed, (2, 0), strict=True):
            row = unpacked(each, 500, width, np.dtype(np.float32))
            assert np.array_equal(row, stored[1][number])
