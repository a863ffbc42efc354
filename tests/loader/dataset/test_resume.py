"""What a state holds, and where it leads; test_epoch_machine.py stops and resumes in any order."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.dataset.in_turns import LoaderInTurns
from torch.utils.data import DataLoader

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    Cells,
    ClassBalancedSampling,
    GroupedSampling,
    StateError,
    Streaming,
    open_collection,
)


def _dataset(n_rows: int, rank: int = 0, world_size: int = 1, **options: Any) -> CellDataset:
    defaults: dict[str, Any] = {
        "strategy": BlockShuffling(3),
        "batch_size": 4,
        "fetch_factor": 3,
        "seed": 5,
    }
    return CellDataset(np.arange(n_rows), rank=rank, world_size=world_size, **defaults | options)


# `LoaderInTurns` starts workers in its own way.
pytestmark = pytest.mark.filterwarnings("ignore:ranks are not compared:UserWarning")


def _taken(iterator: Iterator[Any], n: int) -> list[list[int]]:
    return [next(iterator).tolist() for _ in range(n)]


_LABELS = np.random.default_rng(0).integers(0, 4, 60)
_DRAWN = {
    "by weight": BlockWeightedSampling(3, weights=_LABELS + 1),
    "in equal shares": ClassBalancedSampling(_LABELS, 3),
    "once": ClassBalancedSampling(_LABELS, 3, total_size=25, replace=False),
    "in sets": GroupedSampling(_LABELS, set_size=3),
}


@given(strategy=st.sampled_from(sorted(_DRAWN)), n_together=st.integers(1, 3), data=st.data())
def test_what_is_drawn_is_divided_anew(strategy, n_together, data):
    """As often as the epoch draws it, but for what makes ranks equal; and sets stay whole."""
    drawn = _DRAWN[strategy]
    options = {"strategy": drawn, "batch_size": n_together * drawn.n_together, "fetch_factor": 2}
    expected = Counter(row for each in _dataset(60, **options) for row in each.tolist())
    seen, n_repeated = Counter[int](), 0
    state: dict[str, Any] = {"epoch": 0}
    while state["epoch"] == 0:
        ranks, workers, n = (data.draw(st.integers(low, 3)) for low in (1, 0, 1))
        states = list[dict[str, Any]]()
        for rank in range(ranks):
            loader = LoaderInTurns(_dataset(60, rank, ranks, **options), workers)
            if "format" in state:
                loader.load_state_dict(state)
            for minibatch in itertools.islice(loader, n):
                sets = minibatch.reshape(-1, drawn.n_together)
                assert (_LABELS[sets] == _LABELS[sets[:, :1]]).all()
                seen.update(minibatch.tolist())
            states.append(loader.state_dict())
        state = states[0]
        assert all(each == state for each in states)
        n_repeated += (ranks - 1) * drawn.n_together
    assert not expected - seen
    assert seen.total() - expected.total() <= n_repeated


class TestWorkersThatPersist:
    """With real ones, of `CellDataset.loader`."""

    def test_workers_that_persist_take_a_state_over(self):
        loader = _dataset(90).loader(2, persistent_workers=True)
        whole = [[each.tolist() for each in loader] for _ in range(2)]
        iterator = iter(loader)  # the third epoch
        _taken(iterator, 3)
        del iterator
        other = _dataset(90).loader(2)
        iterator = iter(other)
        _taken(iterator, 5)
        loader.load_state_dict(other.state_dict())
        assert [each.tolist() for each in loader] == whole[0][5:]
        assert [each.tolist() for each in loader] == whole[1]

    def test_a_state_that_the_dataset_took_is_taken_by_workers_that_persist(self):
        dataset = _dataset(90)
        loader = dataset.loader(2, persistent_workers=True)
        whole = [each.tolist() for each in loader]
        iterator = iter(loader)
        _taken(iterator, 5)
        del iterator
        state = loader.state_dict()
        rest = [each.tolist() for each in loader]  # the third epoch
        assert len(rest) == len(whole)
        dataset.load_state_dict(state)
        second = _dataset(90)
        second.set_epoch(1)
        expected = [each.tolist() for each in LoaderInTurns(second, 2)]
        assert [each.tolist() for each in loader] == expected[5:]

    @pytest.mark.parametrize("n_before", [0, 2])
    def test_those_of_another_loader_refuse_a_state_that_they_do_not_know(self, capfd, n_before):
        """They would start the epoch again, or resume at an earlier state that they do know."""
        dataset = _dataset(90)
        if n_before:
            _taken(iter(dataset), n_before)
            dataset.load_state_dict(dataset.state_dict())
        loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
        assert len(list(loader)) == 23 - n_before
        other = _dataset(90)
        other.set_epoch(3)
        _taken(iter(other), 5)
        dataset.load_state_dict(other.state_dict())
        with pytest.raises((StateError, RuntimeError)):
            list(loader)
        assert (
            "a state was loaded after these worker processes had started" in capfd.readouterr().err
        )


def _less_its_mean(fetched: Any) -> Any:
    """Every value depends on all rows of the fetch."""
    if isinstance(fetched, Cells):
        X = fetched.X.toarray()
        return replace(fetched, elements={"X": X - X.mean(axis=0)})
    return fetched - fetched.mean()


class TestTransformsOfWholeFetches:
    """A fetch that was begun is read again as a whole, so that it is transformed as before."""

    @given(n=st.integers(1, 22), workers=st.integers(0, 3))
    def test_the_same_values_follow(self, n, workers):
        def loader() -> LoaderInTurns:
            return LoaderInTurns(_dataset(90, fetch_transform=_less_its_mean), workers)

        whole = [each.tolist() for each in loader()]
        stopped, goes_on = loader(), loader()
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
        for _ in itertools.islice(stopped, n):
            pass
        goes_on.load_state_dict(stopped.state_dict())
        assert [(each.rows.tolist(), each.X.tolist()) for each in goes_on] == whole[n:]

    def test_rows_are_read_by_a_function_as_before(self):
        read = list[list[int]]()

        def noted(table: Any, rows: Any) -> Any:
            read.append(rows.tolist())
            return table[rows]

        stopped, goes_on = (_dataset(90, fetch_callback=noted) for _ in range(2))
        _taken(iter(stopped), 4)
        before = read.copy()
        goes_on.load_state_dict(stopped.state_dict())
        next(iter(goes_on))
        assert read[len(before) :] == before[-1:]


class TestState:
    def test_it_is_small_and_plain(self):
        dataset = _dataset(1000)
        _taken(iter(dataset), 3)
        text = json.dumps(dataset.state_dict())
        assert len(text) < 1000
        assert json.loads(text) == dataset.state_dict()

    def test_the_seed_comes_with_it(self):
        stopped = _dataset(40, seed=None)
        whole = [each.tolist() for each in stopped]
        stopped.set_epoch(0)
        _taken(iter(stopped), 3)
        goes_on = _dataset(40, seed=None)
        goes_on.load_state_dict(stopped.state_dict())
        assert [each.tolist() for each in goes_on] == whole[3:]

    def test_minibatches_that_nobody_counted_are_refused(self):
        dataset = _dataset(40)
        for _ in DataLoader(dataset, batch_size=None, num_workers=2):
            pass
        with pytest.raises(StateError, match=r"dataset\.loader"):
            dataset.state_dict()

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"n_rows": 41}, "n_rows=40 there, n_rows=41 here"),
            ({"batch_size": 5}, "batch_size=4 there, batch_size=5 here"),
            ({"fetch_factor": 2}, "fetch_factor=3 there"),
            ({"drop_last": True}, "drop_last=False there, drop_last=True here"),
            ({"strategy": BlockShuffling(4)}, "block_size=3 there, block_size=4 here"),
            ({"strategy": BlockShuffling(3, indices=np.arange(20))}, "indices=None there"),
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

    def test_a_newer_version_is_refused(self):
        state = _dataset(40).state_dict()
        with pytest.raises(StateError, match=r"version 99, .* update cellfeed"):
            _dataset(40).load_state_dict(state | {"version": 99})

    @given(data=st.data())
    def test_a_damaged_one_is_refused(self, data):
        state = _dataset(40).state_dict()
        name = data.draw(st.sampled_from(sorted(state)))
        value = data.draw(st.none() | st.integers(-5, 5) | st.text(max_size=3))
        changed = state | {name: value}
        if changed == state:
            return
        with pytest.raises(StateError, match=r"state (is damaged|must be|has version)"):
            _dataset(40).load_state_dict(changed)
        with pytest.raises(StateError, match=r"state (is damaged|must be)"):
            _dataset(40).load_state_dict({k: v for k, v in state.items() if k != name})

    @pytest.mark.parametrize(
        "changed",
        [
            {"progress": [1, 1, 11]},
            {"progress": [2, 1, 6]},
            {"progress": [1, 0, 1]},
            {"progress": [1, 1, -1]},
            {"progress": [1, 1, 1.5]},
            {"after": [[1, 1, 11]]},
            {"after": [[1, 1, 4]], "progress": [1, 1, 7]},
            {"epoch": -1},
            {"epoch": 2**62},
            {"epoch": 0.5},
            {"worker": 1},
            {"worker": "a"},
            {"progress": [1, 2**63, 1]},
            {"after": [[2**63, 1, 1]]},
            {"version": None},
            {"version": "1"},
        ],
        ids=str,
    )
    def test_one_whose_place_is_out_of_range_is_refused(self, changed):
        """Of an epoch of ten minibatches; though the checksum is right."""
        dataset = _dataset(40, seed=None)
        state = {k: v for k, v in dataset.state_dict().items() if k != "checksum"} | changed
        text = json.dumps(state, sort_keys=True).encode()
        state["checksum"] = hashlib.blake2b(text, digest_size=8).hexdigest()
        with pytest.raises(StateError, match="the state is damaged: ") as refused:
            dataset.load_state_dict(state)
        assert "\n" not in str(refused.value)
        assert dataset.state_dict()["progress"] == [1, 1, 0]

    @pytest.mark.parametrize("state", [None, {}, [], "text", {"format": "other"}])
    def test_something_else_is_refused(self, state):
        with pytest.raises(StateError, match="must be a result of `state_dict`"):
            _dataset(40).load_state_dict(state)
