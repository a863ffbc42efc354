"""What a state holds, and where it leads; test_epoch_machine.py stops and resumes in any order."""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    ParameterError,
    StateError,
    Streaming,
    open_collection,
)


def _dataset(n_rows: int, rank: int = 0, world_size: int = 1, **options: Any) -> CellDataset:
    defaults: dict[str, Any] = {"batch_size": 4, "fetch_factor": 3, "seed": 5}
    defaults |= {"strategy": BlockShuffling(3), "rank": rank, "world_size": world_size}
    return CellDataset(np.arange(n_rows), **defaults | options)


pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def _taken(iterator: Iterator[Any], n: int) -> list[list[int]]:
    return [next(iterator).tolist() for _ in range(n)]


@pytest.mark.process
class TestWorkersThatPersist:
    """With real ones, of `CellDataset.loader`."""

    def test_take_a_state_over(self):
        """Whether the loader is given it or its dataset, of this run or of another."""
        dataset = _dataset(90)
        loader = dataset.loader(2, persistent_workers=True)
        whole = [[each.tolist() for each in loader] for _ in range(2)]
        iterator = iter(loader)  # the third epoch
        _taken(iterator, 3)
        del iterator
        other = _dataset(90).loader(2)
        iterator = iter(other)
        _taken(iterator, 5)
        for takes in (loader, dataset):
            takes.load_state_dict(other.state_dict())
            assert [each.tolist() for each in loader] == whole[0][5:]
            assert [each.tolist() for each in loader] == whole[1]

    def test_those_of_another_loader_refuse_a_state(self):
        """They have none, and would start the epoch again."""
        dataset = _dataset(90)
        _taken(iter(dataset), 2)
        dataset.load_state_dict(dataset.state_dict())
        with pytest.raises(StateError, match=r"iterate over `dataset\.loader"):
            list(DataLoader(dataset, batch_size=None, num_workers=2))


@pytest.mark.process
@pytest.mark.smoke
def test_a_run_that_is_stopped_goes_on_with_other_workers_and_ranks():
    """What is left of its epoch is divided anew, and each cell comes once."""
    before = _dataset(90).loader(2)
    delivered = np.concatenate(_taken(iter(before), 5)).tolist()
    text = json.dumps(before.state_dict())
    for rank in range(2):
        loader = _dataset(90, rank, 2).loader(1)
        loader.load_state_dict(json.loads(text))
        delivered += np.concatenate([*loader]).tolist()
    assert sorted({*delivered}) == list(range(90))
    assert len(delivered) <= 91


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("n_before", [1, 8, 22, 23, 30, 46])
def test_the_loader_of_torchdata(n_before):
    """Without workers, stopped after so many minibatches of epochs of 23."""
    whole = [each.tolist() for dataset in [_dataset(90)] for _ in range(4) for each in dataset]
    stopped, goes_on = (StatefulDataLoader(_dataset(90), batch_size=None) for _ in range(2))
    for _ in range(n_before // 23):
        list(stopped)
    iterator = iter(stopped) if n_before % 23 else iter(())
    for _ in range(n_before % 23):
        next(iterator)
    state = stopped.state_dict()  # after the end of an iteration, or within one
    goes_on.load_state_dict(state)
    rest = [each.tolist() for _ in range(2) for each in goes_on]
    assert rest[:24] == whole[n_before : n_before + 24]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_workers_of_another_loader_have_no_state():
    loader = StatefulDataLoader(_dataset(90), batch_size=None, num_workers=1)
    with pytest.raises(StateError, match=r"iterate over `dataset\.loader"):
        list(loader)


def _train(paths: list[Path], saved: Path, num_workers: int, steps: Any) -> None:
    """Train for three epochs, from the last checkpoint on; say after each step that it is done."""
    os.setpgrp()
    loader: Any = CellDataset(open_collection(paths), BlockShuffling(3), 4, 3, seed=5).loader(
        num_workers
    )
    state, seen = json.loads(saved.read_text()) if saved.exists() else (loader.state_dict(), [])
    loader.load_state_dict(state)

    def save() -> None:
        """Write a checkpoint, whole or not at all."""
        new = saved.with_suffix(".new")
        new.write_text(json.dumps([loader.state_dict(), seen]))
        new.replace(saved)

    for epoch in range(state["epoch"], 3):
        for step, minibatch in enumerate(loader):
            seen += [[epoch, row] for row in minibatch.rows.tolist()]
            steps.send(None)
            if step % 3 == 0:
                save()
        save()


@pytest.mark.slow
@pytest.mark.process
def test_a_training_that_is_killed_again_and_again(plates, tmp_path):
    """At random moments, with other numbers of workers each time; every row is accounted for."""
    context, moments = multiprocessing.get_context("fork"), random.Random(0)
    n_kills, saved, states = 0, tmp_path / "checkpoint", set[str]()
    while n_kills < settings().max_examples or saved.exists():  # until the last training ends
        receiving, sending = context.Pipe(duplex=False)
        options = plates, saved, moments.choice([0, 0, 0, 1, 2]), sending
        process = context.Process(target=_train, args=options)
        process.start()
        sending.close()
        with contextlib.suppress(EOFError):  # it has ended
            for _ in range(moments.randrange(40)):
                receiving.recv()
        time.sleep(moments.uniform(0, 0.05))
        with contextlib.suppress(ProcessLookupError):  # it is no group yet, or any more
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, as a scheduler does
        process.kill()
        process.join()
        states.add(saved.read_text() if saved.exists() else "")
        if process.exitcode == -signal.SIGKILL:
            n_kills += 1
            continue
        assert process.exitcode == 0
        seen = Counter(map(tuple, json.loads(saved.read_text())[1]))
        assert seen == Counter(itertools.product(range(3), range(63)))
        saved.unlink()
    assert len(states) > n_kills // 4


def _less_its_mean(fetched: Any) -> Any:
    """Every value depends on all rows of the fetch."""
    if isinstance(fetched, Cells):
        X = fetched.X.toarray()
        return replace(fetched, elements={"X": X - X.mean(axis=0)})
    return fetched - fetched.mean()


class TestTransformsOfWholeFetches:
    """A fetch that was begun is read again as a whole, so that it is transformed as before."""

    @given(n=st.integers(1, 22))
    def test_the_same_values_follow(self, n):
        def dataset() -> CellDataset:
            return _dataset(90, fetch_transform=_less_its_mean)

        whole = [each.tolist() for each in dataset()]
        stopped, goes_on = dataset(), dataset()
        assert _taken(iter(stopped), n) == whole[:n]
        goes_on.load_state_dict(stopped.state_dict())
        assert [each.tolist() for each in goes_on] == whole[n:]

    @pytest.mark.parametrize("n", [1, 3, 4, 7])
    def test_of_a_collection(self, plates, n):
        def dataset() -> CellDataset:
            collection = open_collection(plates)
            return CellDataset(
                collection, BlockShuffling(3), 8, 3, seed=5, fetch_transform=_less_its_mean
            )

        whole = [(each.rows.tolist(), each.X.tolist()) for each in dataset()]
        stopped, goes_on = dataset(), dataset()
        list(itertools.islice(stopped, n))
        goes_on.load_state_dict(stopped.state_dict())
        assert [(each.rows.tolist(), each.X.tolist()) for each in goes_on] == whole[n:]


def _with_checksum(state: dict[str, Any]) -> dict[str, Any]:
    state = {name: value for name, value in state.items() if name != "checksum"}
    text = json.dumps(state, sort_keys=True).encode()
    return state | {"checksum": hashlib.blake2b(text, digest_size=8).hexdigest()}


class TestState:
    def test_it_is_small_and_plain_and_has_the_seed(self):
        stopped = _dataset(1000, seed=None)
        whole = [each.tolist() for each in stopped]
        stopped.set_epoch(0)
        _taken(iter(stopped), 3)
        text = json.dumps(stopped.state_dict())
        assert len(text) < 1000
        goes_on = _dataset(1000, seed=None)
        goes_on.load_state_dict(json.loads(text))
        assert [each.tolist() for each in goes_on] == whole[3:]

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"n_rows": 41}, "n_rows=40 there, n_rows=41 here"),
            ({"batch_size": 5}, "batch_size=4 there, batch_size=5 here"),
            ({"fetch_factor": 2}, "fetch_factor=3 there"),
            ({"drop_last": True}, "drop_last=False there, drop_last=True here"),
            ({"strategy": BlockShuffling(4)}, "block_size=3 there, block_size=4 here"),
            ({"strategy": BlockShuffling(3, indices=np.arange(20))}, "indices=None there"),
            ({"strategy": BlockShuffling(3, drop_last=True)}, "strategy.drop_last=None there"),
            ({"strategy": Streaming()}, "strategy='BlockShuffling' there"),
            ({"seed": 6}, "seed=5, but seed=6 was given"),
        ],
    )
    def test_another_run_is_refused_and_left_as_it_was(self, other, message):
        stopped = _dataset(40)
        _taken(iter(stopped), 3)
        dataset = _dataset(**{"n_rows": 40} | other)
        before = dataset.state_dict()
        with pytest.raises(StateError, match=message) as refused:
            dataset.load_state_dict(stopped.state_dict())
        assert "\n" not in str(refused.value)
        assert dataset.state_dict() == before

    @given(data=st.data())
    def test_a_damaged_or_newer_one_is_refused(self, data):
        dataset = _dataset(40)
        state = dataset.state_dict()
        with pytest.raises(StateError, match=r"version 99, .* update cellfeed"):
            dataset.load_state_dict(state | {"version": 99})
        name = data.draw(st.sampled_from(sorted(state)))
        value = data.draw(st.none() | st.integers(-5, 5) | st.text(max_size=3))
        changed = state | {name: value}
        if changed == state:
            return
        with pytest.raises(StateError, match=r"state (is damaged|must be|has version)"):
            dataset.load_state_dict(changed)
        with pytest.raises(StateError, match=r"state (is damaged|must be)"):
            dataset.load_state_dict({k: v for k, v in state.items() if k != name})

    @pytest.mark.parametrize(
        "changed",
        [
            *({"progress": each} for each in ([1, 11], [2, 6], [0, 1], [1, -1])),
            *({"progress": each} for each in ([1, 1.5], [2**63, 1], [1, 1, 1])),
            *({"after": each} for each in ([[1, 11]], [[2**63, 1]])),
            {"after": [[1, 4]], "progress": [1, 7]},
            *({"epoch": each} for each in (-1, 2**62, 0.5)),
            *({"version": each} for each in (None, "1")),
        ],
        ids=str,
    )
    def test_one_whose_place_is_out_of_range_is_refused(self, changed):
        """Of an epoch of ten minibatches; though the checksum is right."""
        dataset = _dataset(40, seed=None)
        state = _with_checksum(dataset.state_dict() | changed)
        with pytest.raises(StateError, match="the state is damaged: ") as refused:
            dataset.load_state_dict(state)
        assert "\n" not in str(refused.value)
        assert dataset.state_dict()["progress"] == [1, 0]

    @pytest.mark.parametrize("state", [None, {}, [], "text", {"format": "other"}])
    def test_something_else_is_refused(self, state):
        with pytest.raises(StateError, match="must be a result of `state_dict`"):
            _dataset(40).load_state_dict(state)


STATES = json.loads(Path(__file__).with_name("golden_states.json").read_text())
_GOLDEN = {
    "blocks": BlockShuffling(8),
    "some rows": BlockShuffling(4, indices=np.arange(100, 900), drop_last=True),
    "streaming": Streaming(shuffle=True),
}


@pytest.mark.parametrize("golden", STATES, ids=lambda golden: golden["name"])
def test_states_that_were_written_go_on(golden: dict[str, Any]) -> None:
    """The order is pinned; see golden_states.json."""
    for rank, expected in enumerate(golden["rows"]):
        options = {"strategy": _GOLDEN[golden["strategy"]], "batch_size": 16, "fetch_factor": 4}
        resumed = _dataset(1000, rank, len(golden["rows"]), seed=7, **options)
        resumed.load_state_dict(golden["state"])
        assert next(iter(resumed)).tolist() == expected


# A run is not resumed on other cells that have the names and the size of those it was of.
def _over(given, **options):
    return CellDataset(open_collection(given, **options), BlockShuffling(2), 5, 2, seed=0)


def adata(seed=0, form=sp.csr_matrix):
    counts = np.random.default_rng(seed).poisson(1, (60, 7)).astype(np.float32)
    obs = pd.DataFrame(index=[f"c{row}" for row in range(60)])
    return ad.AnnData(form(counts), obs=obs, layers={"dense": counts})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stream of which windows of 4 and of 4 every 4, of 2 every 4, and documents are 30."""
    tokens = pytest.importorskip("cellfeed.storages.tokens")
    folder = tmp_path_factory.mktemp("stream")
    with tokens.TokenStreamWriter(folder, "uint16", documents=True) as writer:
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
    tokens = pytest.importorskip("cellfeed.storages.tokens")
    first, second = (tokens.TokenStream(folder, **ROWS[each]) for each in (before, after))
    assert first.n_rows == second.n_rows
    state = _over(first).state_dict()
    if before == after:
        _over(second).load_state_dict(state)
        return
    told = r"the state is of other data: contents=.* query or object"
    with pytest.raises(StateError, match=told):
        _over(second).load_state_dict(state)


@pytest.mark.parametrize("form", [sp.csr_matrix, np.asarray, np.asfortranarray])
def test_an_object_in_memory(form):
    whole, renamed = adata(form=form), adata(form=form)
    renamed.obs_names = [f"d{row}" for row in range(60)]
    state, of_half = (_over(each).state_dict() for each in (whole, whole[:30]))
    _over(adata(form=form)).load_state_dict(state)
    _over(adata(form=form), elements=["layers/dense"]).load_state_dict(state)
    _over(whole[:30].copy()).load_state_dict(of_half)
    for known, others in (
        (state, (adata(1, form), renamed)),
        (of_half, (whole[30:], whole[:30, ::-1])),
    ):
        for other in others:
            with pytest.raises(StateError, match="the state is of other data"):
                _over(other).load_state_dict(known)


@pytest.mark.parametrize("other", ["no X", "by gene"])
def test_objects_without_values_to_look_at(other):
    def given():
        made = adata()
        made.X = None if other == "no X" else made.X.tocsc()
        return made

    state = _over(given(), elements=["layers/dense"]).state_dict()
    _over(given(), elements=["layers/dense"]).load_state_dict(state)


def test_files_are_what_they_were(tmp_path):
    """A copy of a file, which the system tells from it, is taken, as it always was."""
    path = tmp_path / "cells.h5ad"
    adata().write_h5ad(path)
    state = _over(path).state_dict()
    assert "contents" not in state["data"]
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    copy.write_bytes(path.read_bytes())
    _over(copy).load_state_dict(state)


class Skipping(Streaming):
    """A strategy of one's own, with an attribute of any kind."""

    def __init__(self, skipped, identity=None):
        super().__init__()
        vars(self)["skipped"] = skipped
        vars(self)["name"] = identity

    def identity(self):
        return vars(self)["name"]


class Opaque:
    """What JSON cannot say."""


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({1, 2}, {1, 3}),
        (frozenset("ab"), frozenset("ac")),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        ({"a": [1, {2}]}, {"a": [1, {3}]}),
        (np.float32(0.1), np.float32(0.2)),
        (np.mean, np.sum),
    ],
    ids=lambda each: type(each).__name__,
)
def test_another_strategy_is_refused_whatever_its_attributes_are(mine, other):
    state = _dataset(40, strategy=Skipping(mine)).state_dict()
    _dataset(40, strategy=Skipping(mine)).load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(StateError, match="the state is of other parameters"):
        _dataset(40, strategy=Skipping(other)).load_state_dict(state)


@pytest.mark.parametrize("value", [Opaque(), lambda: 1, [Opaque()], 1j])
def test_a_strategy_that_json_cannot_identify_is_asked_to_do_it(value):
    with pytest.raises(ParameterError, match=r"^Skipping\.skipped.* `identity\(\)`"):
        _dataset(40, strategy=Skipping(value)).state_dict()
    state = _dataset(40, strategy=Skipping(value, "first")).state_dict()
    _dataset(40, strategy=Skipping(value, "first")).load_state_dict(state)
    with pytest.raises(StateError, match="identity='first' there, identity='second' here"):
        _dataset(40, strategy=Skipping(value, "second")).load_state_dict(state)


@pytest.mark.parametrize("name", ["batch_size", "fetch_factor", "drop_last", "seed", "strategy"])
def test_parameters_are_fixed(name):
    """Or cells would be missing after a stop."""
    dataset = _dataset(40)
    with pytest.raises((ParameterError, AttributeError)):
        setattr(dataset, name, 5)


@dataclass(frozen=True, slots=True)
class Settings:
    """Part of a strategy of one's own."""

    size: int


@dataclass(frozen=True, kw_only=True)
class InPieces(Streaming):
    """A strategy whose settings have slots."""

    settings: Settings


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
