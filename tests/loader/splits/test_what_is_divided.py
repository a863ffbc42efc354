"""What can be divided, what labels it has, and what is refused."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellfeed import (
    BlockShuffling,
    CategoricalColumn,
    CellDataset,
    ColumnError,
    ParameterError,
    Streaming,
    open_collection,
    random_split,
)


class TestCollections:
    def test_columns_are_named(self, plates):
        opened = open_collection(plates, obs=["cell_type"])
        named = random_split(opened, [0.5, 0.5], seed=0, stratify="cell_type")
        column = opened.obs["cell_type"]
        assert isinstance(column, CategoricalColumn)
        codes = np.asarray(opened[:].obs["cell_type"], np.int64)
        labels = pd.Categorical.from_codes(codes, pd.Index(column.categories))
        given = random_split(63, [0.5, 0.5], seed=0, stratify=labels)
        assert all(map(np.array_equal, named, given))

    def test_columns_that_were_not_opened_are_read(self, plates):
        collection = open_collection(plates)
        with pytest.warns(UserWarning, match="whole groups of plate do not"):
            first, second = random_split(collection, [0.8, 0.2], seed=0, group="plate")
        assert sorted([first.tolist(), second.tolist()]) == [list(range(37)), list(range(37, 63))]
        assert list(collection.obs) == []

    def test_parts_are_the_indices_of_strategies(self, plates):
        collection = open_collection(plates)
        split = random_split(collection, [0.8, 0.2], seed=0)
        for rows in split:
            dataset = CellDataset(collection, BlockShuffling(4, indices=rows), 8, 2, seed=0)
            seen = np.concatenate([np.asarray(minibatch.rows) for minibatch in dataset])
            assert np.array_equal(np.sort(seen), rows)

    def test_selected_rows_alone_are_divided(self, plates):
        collection = open_collection(plates, obs=["cell_type"])
        rows = collection.where("plate == 'p2'")
        split = random_split(collection, [0.5, 0.5], seed=0, indices=rows, stratify="cell_type")
        assert np.array_equal(np.sort(np.concatenate(split)), rows)
        types = collection[:].obs["cell_type"]
        for code, n in enumerate(np.bincount(types[rows])):
            assert abs(2 * (types[split[0]] == code).sum() - n) <= 1

    def test_numbers_are_labels_too(self, write_h5ad):
        dose = np.repeat([0.5, 2.0, np.nan], [12, 8, 4])
        collection = open_collection(write_h5ad(np.eye(24), {"dose": dose}))
        _, part = random_split(collection, [0.75, 0.25], seed=0, stratify="dose")
        assert [
            np.count_nonzero((part >= a) & (part < b)) for a, b in ((0, 12), (12, 20), (20, 24))
        ] == [3, 2, 1]

    def test_anything_with_a_length_can_be_divided(self):
        for cells in (np.zeros((10, 2)), [0] * 10, range(10)):
            assert [each.size for each in random_split(cells, [0.8, 0.2], seed=0)] == [8, 2]

    @pytest.mark.parametrize("make", [pd.Series, pd.Index, pd.Categorical, list, np.array])
    def test_labels_of_any_kind(self, make):
        labels = np.arange(40) % 4 + 10
        split = random_split(40, [0.5, 0.5], seed=0, stratify=make(labels))
        assert np.bincount(labels[split[0]])[10:].tolist() == [5, 5, 5, 5]


ERRORS = {
    "sum": ({"fractions": [0.5, 0.4]}, r"^`fractions` must sum to 1, but \[0.5, 0.4\] sum to 0.9$"),
    "negative": (
        {"fractions": [1.5, -0.5]},
        "^`fractions` must be numbers above 0, at least one, but got ",
    ),
    "zero": ({"fractions": [1.0, 0.0]}, "^`fractions` must be numbers above 0"),
    "nan": ({"fractions": [float("nan"), 1.0]}, "^`fractions` must be numbers above 0"),
    "tiny": ({"fractions": [1.0, 1e-12]}, r"^part 1 \(fraction 1e-12\) gets none of 20 rows"),
    "none": ({"fractions": []}, "^`fractions` must be numbers above 0"),
    "a number": ({"fractions": 0.8}, r"^`fractions` must be numbers .* but got 0\.8$"),
    "text": ({"fractions": ["a", "b"]}, "^`fractions` must be numbers"),
    "empty part": (
        {"fractions": [0.999, 0.001], "method": "deterministic"},
        r"^part 1 \(fraction 0.001\) gets none of 20 rows; give fewer parts",
    ),
    "method": ({"method": "exact"}, "^`method` must be one of 'deterministic', 'multinomial', 's"),
    "seed": ({"seed": 0.5}, "^`seed` must be an integer"),
    "seed below 0": ({"seed": -1}, "^`seed >= 0` must hold, but got seed=-1"),
    "dataset": (
        {"collection": CellDataset(np.arange(9), Streaming(), 3)},
        "^`collection` is a CellDataset, which has minibatches and no rows",
    ),
    "no rows": ({"collection": 0}, "^`collection >= 1` must hold"),
    "path": ({"collection": "a.h5ad"}, "open it with `open_collection`"),
    "no length": ({"collection": None}, "^an indexable must have a length"),
    "labels": ({"stratify": np.zeros(19)}, r"^`stratify` must have a label for each of 20 rows"),
    "no name": ({"group": []}, "^`group` is empty"),
    "few groups": (
        {"group": np.zeros(20)},
        "^2 parts need at least as many groups, but there are 1 of the labels of `group`; give",
    ),
    "multinomial": (
        {"stratify": np.zeros(20), "method": "multinomial"},
        "^method='multinomial' draws rows independently",
    ),
    "indices": (
        {"indices": [0, 20]},
        "^`0 <= indices < 20` must hold, but got indices from 0 to 20$",
    ),
    "indices twice": ({"indices": [3, 1, 3]}, "^`indices` has row 3 twice; give each row once$"),
    "no indices": ({"indices": []}, "^`indices` must be .*; .* no cell matches the query$"),
}


@pytest.mark.parametrize(("options", "said"), ERRORS.values(), ids=list(ERRORS))
def test_mistakes_are_refused_in_one_line(options, said):
    usual = {"collection": 20, "fractions": [0.8, 0.2], "seed": 0}
    with pytest.raises(ParameterError, match=said) as raised:
        random_split(**(usual | options))
    assert "\n" not in str(raised.value)


def test_unknown_columns_are_refused(plates):
    told = "obs has no column 'donor'; its columns are: plate, cell"
    with pytest.raises(ColumnError, match=told):
        random_split(open_collection(plates), [0.8, 0.2], seed=0, group="donor")
    cells = ad.AnnData(np.zeros((4, 1)), obs=pd.DataFrame({"plate": [1] * 4}, index=list("abcd")))
    told = r"^`group`: obs has no column 'donor'; its columns are: p"
    with pytest.raises(ColumnError, match=told):
        random_split(cells, [0.5, 0.5], seed=0, group="donor")
    with pytest.raises(ColumnError, match=r"^`group` names the obs column 'donor', but a int has"):
        random_split(20, [0.5, 0.5], seed=0, group="donor")
