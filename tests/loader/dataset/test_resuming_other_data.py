"""A run is not resumed on other cells that have the names and the size of those it was of."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellfeed import (
    BlockShuffling,
    CellDataset,
    StateError,
    Streaming,
    TokenStream,
    TokenStreamWriter,
    open_collection,
)

N_CELLS = 60


def dataset(given, **options):
    return CellDataset(open_collection(given, **options), BlockShuffling(2), 5, 2, seed=0)


def adata(seed=0, form=sp.csr_matrix):
    counts = np.random.default_rng(seed).poisson(1, (N_CELLS, 7)).astype(np.float32)
    obs = pd.DataFrame(index=[f"c{row}" for row in range(N_CELLS)])
    return ad.AnnData(form(counts), obs=obs, layers={"dense": counts})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stream of which windows of 4 and of 4 every 4, of 2 every 4, and documents are 30."""
    folder = tmp_path_factory.mktemp("stream")
    with TokenStreamWriter(folder, "uint16", documents=True) as writer:
        for document in range(30):
            writer.append(np.full(4, document))
    return folder


ROWS: dict[str, Any] = {
    "window": {"window": 4},
    "shorter": {"window": 2, "stride": 4},
    "documents": {"documents": True},
}


@pytest.mark.parametrize("before", ROWS)
@pytest.mark.parametrize("after", ROWS)
def test_rows_of_a_token_stream(folder, before, after):
    first, second = (TokenStream(folder, **ROWS[each]) for each in (before, after))
    assert first.n_rows == second.n_rows
    state = dataset(first).state_dict()
    if before == after:
        dataset(second).load_state_dict(state)
        return
    with pytest.raises(
        StateError, match=r"the state is of other data: contents=.* query or object"
    ):
        dataset(second).load_state_dict(state)


@pytest.mark.parametrize("form", [sp.csr_matrix, np.asarray, np.asfortranarray])
def test_an_object_in_memory(form):
    state = dataset(adata(form=form)).state_dict()
    dataset(adata(form=form)).load_state_dict(state)
    dataset(adata(form=form), elements=["layers/dense"]).load_state_dict(state)
    renamed = adata(form=form)
    renamed.obs_names = [f"d{row}" for row in range(N_CELLS)]
    for other in (adata(1, form), renamed):
        with pytest.raises(StateError, match="the state is of other data"):
            dataset(other).load_state_dict(state)


def test_other_cells_of_one_object():
    whole = adata()
    state = dataset(whole[:30]).state_dict()
    dataset(whole[:30].copy()).load_state_dict(state)
    for other in (whole[30:], whole[:30, ::-1]):
        with pytest.raises(StateError, match="the state is of other data"):
            dataset(other).load_state_dict(state)


@pytest.mark.parametrize("other", ["no X", "by gene"])
def test_objects_without_values_to_look_at(other):
    def given():
        made = adata()
        made.X = None if other == "no X" else made.X.tocsc()
        return made

    state = dataset(given(), elements=["layers/dense"]).state_dict()
    dataset(given(), elements=["layers/dense"]).load_state_dict(state)


def test_files_are_what_they_were(tmp_path):
    """A copy of a file, which the system tells from it, is taken, as it always was."""
    path = tmp_path / "cells.h5ad"
    adata().write_h5ad(path)
    state = dataset(path).state_dict()
    assert "contents" not in state["data"]
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    copy.write_bytes(path.read_bytes())
    dataset(copy).load_state_dict(state)


def test_a_state_from_before_contents_were_compared(folder):
    state = dataset(TokenStream(folder, 4)).state_dict()
    del state["data"]["contents"]
    del state["checksum"]
    text = json.dumps(state, sort_keys=True)
    state["checksum"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    dataset(TokenStream(folder, 4)).load_state_dict(state)


@dataclass(frozen=True, slots=True)
class Settings:
    """Part of a strategy of one's own."""

    size: int


@dataclass(frozen=True, kw_only=True)
class InPieces(Streaming):
    """A strategy whose settings have slots."""

    settings: Settings


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("of_dataset", [False, True])
def test_a_parameter_of_the_strategy_that_the_dataset_has_too(before, of_dataset):
    saved, again, other = (
        CellDataset(
            np.arange(403), BlockShuffling(16, drop_last=each), 8, seed=0, drop_last=of_dataset
        )
        for each in (before, before, not before)
    )
    next(iter(saved))
    again.load_state_dict(saved.state_dict())
    with pytest.raises(StateError, match=r"drop_last"):
        other.load_state_dict(saved.state_dict())


def test_settings_with_slots_are_compared():
    three, again, four = (
        CellDataset(np.arange(20), InPieces(settings=Settings(size)), 5, seed=0)
        for size in (3, 3, 4)
    )
    next(iter(three))
    again.load_state_dict(three.state_dict())
    assert next(iter(again)).tolist() == list(range(5, 10))
    with pytest.raises(StateError, match="settings"):
        four.load_state_dict(three.state_dict())
