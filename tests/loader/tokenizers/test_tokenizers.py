"""Tokens equal the formulas in NumPy, for every way rows come, and do not depend on how."""

import copy
import dataclasses
import functools
import itertools
import json
import warnings
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.loader.read_options import parameters_of
from tests.loader.tokenizers.formulas import made_of, row_key

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    FormatError,
    ParameterError,
    RaggedTensor,
    Streaming,
    open_collection,
)
from cellfeed.tokenizers import (
    BinnedValues,
    GeneSubset,
    MaskTokens,
    MaskValues,
    RankTokens,
)
from cellfeed.transforms import Log1p, NormalizeTotal

N_GENES, SEED = 23, 5
GENES = [f"gene{i}" for i in range(N_GENES)]
SPECIAL = {"<pad>": 0, "<cls>": 1, "<eos>": 2, "<mask>": 3}
# Tokens do not ascend with columns, and some genes have none.
VOCABULARY = SPECIAL | {f"gene{i}": 900 - 37 * (i * 7 % N_GENES) for i in range(N_GENES) if i % 5}
MEDIANS = {f"gene{i}": [1.0, 2.0, 0.5][i % 3] for i in range(N_GENES) if i != 3}

COUNTS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 9), st.just(N_GENES)),
    elements=st.one_of(
        st.just(0),
        st.integers(0, 3),
        st.integers(0, 1 << 20),
        st.integers(0, 999).map(lambda n: n / 64),
    ),
)
NEITHER: Any = "neither"
LENGTHS, PADDINGS = st.integers(4, 30), st.sampled_from(["longest", "max_length", None])
OF_ALL, CLS = st.sampled_from(["nonzero", "all"]), st.sampled_from(["<cls>", None])
TOKENIZERS = st.one_of(
    st.builds(
        functools.partial(RankTokens, VOCABULARY),
        st.sampled_from([None, MEDIANS]),
        max_length=LENGTHS,
        padding=PADDINGS,
        cls=CLS,
        eos=st.sampled_from(["<eos>", None]),
    ),
    st.builds(
        functools.partial(BinnedValues, VOCABULARY),
        st.sampled_from([2, 3, 5, 51]),
        genes=OF_ALL,
        max_length=LENGTHS,
        padding=PADDINGS,
        cls=CLS,
    ),
    st.builds(functools.partial(GeneSubset, VOCABULARY), LENGTHS, genes=OF_ALL),
)


def oracle_of(tokenizer, X, rows, *, epoch=0, masking=None, genes=GENES):
    """Return the tokens, values, labels and masks of rows of a dense matrix."""
    tokens, medians = tokenizer.tokens_of(np.array(genes, object)), np.ones(len(genes))
    if isinstance(tokenizer, RankTokens) and tokenizer.medians is not None:
        medians = np.array([MEDIANS.get(each, np.nan) for each in genes])
    return [
        made_of(tokenizer, X[row], tokens, medians, row_key(SEED, epoch, row), masking)
        for row in rows
    ]


def assert_equal(minibatch, expected, tokenizer, masking=None):
    """Check a minibatch of tensors, padded or ragged."""
    lengths = [len(each[0]) for each in expected]
    assert minibatch["lengths"].tolist() == lengths
    pads = {"tokens": 0, "values": getattr(tokenizer, "pad_value", 0), "masked": False}
    pads["labels"] = pads["values"] if isinstance(masking, MaskValues) else -100
    dtypes = {"tokens": torch.int64, "values": torch.float32, "masked": torch.bool}
    dtypes["labels"] = torch.float32 if isinstance(masking, MaskValues) else torch.int64
    width = tokenizer.max_length if tokenizer.padding == "max_length" else max(lengths)
    for name, own in zip(
        ("tokens", "values", "labels", "masked"), zip(*expected, strict=True), strict=True
    ):
        if own[0] is None:
            assert name not in minibatch
            continue
        found = minibatch[name]
        if tokenizer.padding is None:
            assert isinstance(found, RaggedTensor)
            assert found.row(0).dtype == dtypes[name]
            for k, each in enumerate(own):
                assert np.array_equal(found.row(k).numpy(), each)
            continue
        padded = [np.pad(each, (0, width - len(each)), constant_values=pads[name]) for each in own]
        assert found.dtype == dtypes[name]
        assert np.array_equal(found.numpy(), np.array(padded).reshape(len(own), width)), name
    if tokenizer.padding is None:
        assert "attention_mask" not in minibatch
    else:
        there = np.arange(width) < np.array(lengths)[:, None]
        assert np.array_equal(minibatch["attention_mask"].numpy(), there)


@given(
    X=COUNTS,
    tokenizer=TOKENIZERS,
    masking=st.sampled_from(
        [None, MaskTokens(0.5), MaskTokens(1, "<mask>", 0.5, 0.5), MaskValues(0.7)]
    ),
    dtype=st.sampled_from(["float32", "float64", "int32", "uint16"]),
    is_sparse=st.booleans(),
    batch_size=st.integers(1, 6),
)
def test_tokens_are_those_of_the_formulas(
    write_h5ad, X, tokenizer, masking, dtype, is_sparse, batch_size
):
    if isinstance(masking, MaskValues) and not tokenizer.has_values:
        masking = None
    tokenizer = dataclasses.replace(tokenizer, masking=masking)
    X = np.minimum(X, 60_000).astype(dtype)
    collection = open_collection(write_h5ad(sp.csr_matrix(X) if is_sparse else X))
    dataset = CellDataset(
        collection, BlockShuffling(2), batch_size, fetch_factor=2, seed=SEED, transform=tokenizer
    )
    values = X if dtype == "float64" else X.astype(np.float32)
    n_tokens = 0
    for minibatch in dataset:
        expected = oracle_of(tokenizer, values, minibatch.rows.tolist(), masking=masking)
        assert_equal(minibatch, expected, tokenizer, masking)
        n_tokens += int(minibatch["lengths"].sum())
    statistics = dataset.statistics()
    tokens = tokenizer.tokens_of(np.array(GENES, dtype=object))
    assert statistics.n_tokens == n_tokens
    assert statistics.n_unknown == np.count_nonzero(X[:, tokens < 0])
    assert minibatch.X is minibatch["tokens"]


@pytest.mark.parametrize("kind", ["equal", "few values", "close", "close, and one far"])
def test_long_rows_with_ties_are_sorted(write_h5ad, kind):
    """Also where the first bits of most values are the same, and tokens descend."""
    rng, n = np.random.default_rng(0), 3000
    X = {
        "equal": np.ones((3, n)),
        "few values": rng.integers(1, 4, (3, n)).astype(float),
        "close": 1 + rng.integers(0, 50, (3, n)) * 2.0**-50,
        "close, and one far": 1 + rng.integers(0, 50, (3, n)) * 2.0**-50,
    }[kind]
    if kind == "close, and one far":
        X[:, 5] = 2.0**300
    genes = [f"gene{i}" for i in range(n)]
    tokens = rng.permutation(100_000)[:n]
    path = write_h5ad(sp.csr_matrix(X))
    vocabulary = SPECIAL | dict(zip(genes, (tokens + 10).tolist(), strict=True))
    tokenizer = RankTokens(vocabulary, max_length=2048)
    dataset = CellDataset(open_collection(path), Streaming(), 3, seed=SEED, transform=tokenizer)
    (minibatch,) = dataset
    if kind.startswith("close"):  # whose total NumPy rounds otherwise; it changes no order here
        for k in range(3):
            order = np.lexsort([tokens, -X[k]])
            assert minibatch["tokens"][k, 1:2047].tolist() == (tokens[order[:2046]] + 10).tolist()
    else:
        assert_equal(minibatch, oracle_of(tokenizer, X, range(3), genes=genes), tokenizer)


def test_after_other_transforms(write_h5ad):
    X = np.random.default_rng(0).poisson(1, (40, N_GENES)).astype(np.float32)
    collection = open_collection(write_h5ad(sp.csr_matrix(X)))
    first, tokenizer = [NormalizeTotal(1e4), Log1p()], BinnedValues(VOCABULARY, 7, max_length=12)
    options: dict[str, Any] = {"seed": SEED, "batch_size": 8, "fetch_factor": 2}
    plain = CellDataset(collection, BlockShuffling(4), transform=first, **options)
    dataset = CellDataset(collection, BlockShuffling(4), transform=[*first, tokenizer], **options)
    values = np.zeros_like(X)
    for minibatch in plain:
        values[minibatch.rows] = minibatch.X.to_dense()
    for minibatch in dataset:
        assert_equal(minibatch, oracle_of(tokenizer, values, minibatch.rows.tolist()), tokenizer)


@pytest.fixture(scope="module")
def counts():
    return np.random.default_rng(1).poisson(0.8, (150, N_GENES)).astype(np.float32)


@pytest.fixture(scope="module")
def collection(write_h5ad, counts):
    parts = [sp.csr_matrix(counts[:70]), sp.csr_matrix(counts[70:])]
    return open_collection([write_h5ad(each, compression="gzip") for each in parts])


DRAWN = [
    [BinnedValues(VOCABULARY, 4, max_length=6, masking=MaskValues(0.5))],
    [GeneSubset(VOCABULARY, 5)],
    [RankTokens(VOCABULARY, MEDIANS, max_length=9, padding=None, masking=MaskTokens(0.4))],
]


def cells_of(minibatches):
    """Return what each row has, as lists."""
    found = {}
    for minibatch in minibatches:
        for k, row in enumerate(minibatch.rows.tolist()):
            n = int(minibatch["lengths"][k])
            found[row] = [
                (name, (each.row(k) if isinstance(each, RaggedTensor) else each[k])[:n].tolist())
                for name, each in minibatch.items()
                if name not in {"lengths", "attention_mask"}
            ]
    return found


def dataset_of(collection, steps, strategy=None, **options):
    options = {"batch_size": 8, "fetch_factor": 3, "seed": SEED} | options
    return CellDataset(
        collection, strategy or BlockShuffling(4), transform=steps, **parameters_of(options)
    )


@pytest.mark.process
@pytest.mark.parametrize(("steps", "method"), [(DRAWN[0], "fork"), (DRAWN[2], "forkserver")])
def test_workers_deliver_the_same_tokens_of_each_cell(collection, steps, method):
    dataset = dataset_of(collection, steps)
    alone = [cells_of(dataset) for _ in range(2)]
    assert alone[0] != alone[1]
    assert set(alone[0]) == set(alone[1]) == set(range(150))
    loader = dataset_of(collection, steps).loader(num_workers=2, multiprocessing_context=method)
    assert [cells_of(loader) for _ in range(2)] == alone
    kept = dataset_of(collection, steps).loader(num_workers=2, persistent_workers=True)
    minibatches = list(kept)  # whose memory is not reused while they are kept
    list(kept)
    assert cells_of(minibatches) == alone[0]


@pytest.mark.parametrize("steps", DRAWN)
def test_ranks_strategies_and_settings_deliver_the_same(collection, steps):
    alone = cells_of(dataset_of(collection, steps))
    ranks = [dataset_of(collection, steps, rank=rank, world_size=3) for rank in range(3)]
    found = dict[int, Any]()
    for each in ranks:
        found |= cells_of(each)
    assert found == {row: alone[row] for row in found}
    assert len(found) >= 144
    others = dataset_of(collection, steps, Streaming(), batch_size=11, num_threads=3)
    assert cells_of(others) == alone
    second = dataset_of(collection, steps)
    second.set_epoch(1)
    assert cells_of(others) == cells_of(second)


@pytest.mark.parametrize(
    ("steps", "num_workers", "num_workers_after"),
    [
        *((each, 0, 0) for each in DRAWN),
        pytest.param(DRAWN[0], 0, 2, marks=pytest.mark.process),
        pytest.param(DRAWN[2], 2, 0, marks=pytest.mark.process),
    ],
)
def test_a_resumed_run_delivers_the_same(collection, steps, num_workers, num_workers_after):
    whole = dataset_of(collection, steps)
    list(whole)
    alone = cells_of(whole)
    loader = dataset_of(collection, steps).loader(num_workers)
    list(loader)
    first = list(itertools.islice(loader, 5))
    state = json.loads(json.dumps(loader.state_dict()))
    again = dataset_of(collection, steps).loader(num_workers_after)
    again.load_state_dict(state)
    found = cells_of(first), cells_of(again)
    assert not set(found[0]) & set(found[1])
    assert found[0] | found[1] == alone


def test_a_state_is_of_one_vocabulary_and_stays_small(collection):
    many = VOCABULARY | {f"other{i}": 1000 + i for i in range(50_000)}
    dataset = dataset_of(collection, RankTokens(many, MEDIANS, max_length=9))
    next(iter(dataset))
    state = dataset.state_dict()
    assert len(json.dumps(state)) < 5_000
    other = dataset_of(collection, RankTokens(VOCABULARY, MEDIANS, max_length=9))
    with pytest.raises(ValueError, match="the state is of other parameters: transform="):
        other.load_state_dict(state)


def test_a_cell_that_comes_twice_has_the_same_tokens_in_an_epoch(collection, counts):
    strategy = BlockWeightedSampling(3, weights=np.arange(150) % 9)
    tokenizer = GeneSubset(VOCABULARY, 6)
    n_rows = []
    for minibatch in dataset_of(collection, tokenizer, strategy):
        rows = minibatch.rows.tolist()
        assert_equal(minibatch, oracle_of(tokenizer, counts, rows), tokenizer)
        n_rows += rows
    assert len(set(n_rows)) < len(n_rows)


@pytest.mark.parametrize("alias", [{}, {"gene1 before": 1e-3}])
def test_medians_are_those_of_names_where_two_have_one_token(collection, counts, alias):
    both = VOCABULARY | {"gene1 before": VOCABULARY["gene1"]}
    tokenizer = RankTokens(both, MEDIANS | alias, max_length=20)
    for minibatch in dataset_of(collection, tokenizer):
        expected = oracle_of(RankTokens(VOCABULARY, MEDIANS, max_length=20), counts, minibatch.rows)
        assert_equal(minibatch, expected, tokenizer)


def test_gene_spaces_of_files_become_one(write_h5ad, counts):
    """Joined as the collection joins them: outer, or given genes; the vocabulary stays."""
    rng = np.random.default_rng(3)
    genes = [rng.permutation(GENES)[:n].tolist() for n in (20, 17)]
    frames = [
        pd.DataFrame(counts[at], columns=GENES)[own]
        for at, own in zip((slice(0, 70), slice(70, 150)), genes, strict=True)
    ]
    paths = [write_h5ad(sp.csr_matrix(each), genes=list(each)) for each in frames]
    tokenizer = RankTokens(VOCABULARY, MEDIANS, max_length=20)
    both = [each for each in GENES[:15] if each in genes[0] and each in genes[1]]
    cases: list[dict[str, Any]] = [{"join_vars": "outer"}, {"join_vars": "inner"}, {"genes": both}]
    for options in cases:
        opened = open_collection(paths, **options)
        names = opened.var_names.tolist()
        joint = pd.concat(frames).fillna(0).reindex(columns=names).to_numpy(np.float32)
        for minibatch in dataset_of(opened, tokenizer):
            expected = oracle_of(tokenizer, joint, minibatch.rows.tolist(), genes=names)
            assert_equal(minibatch, expected, tokenizer)


def test_in_numpy_and_beside_other_elements(write_h5ad, counts):
    path = write_h5ad(sp.csr_matrix(counts), layers={"raw": sp.csr_matrix(counts * 2)})
    opened = open_collection(path, elements=["layers/raw", "X"])
    steps = {"X": RankTokens(VOCABULARY, max_length=9)}
    cells = next(iter(dataset_of(opened, steps, as_torch=False)))
    assert list(cells.keys()) == ["layers/raw", "tokens", "attention_mask", "lengths"]
    assert np.array_equal(cells.X.toarray(), 2 * counts[cells.rows])
    minibatch = next(iter(dataset_of(opened, steps).loader()))
    assert np.array_equal(minibatch["tokens"].numpy(), cells["tokens"])
    assert np.array_equal(minibatch.X.to_dense().numpy(), cells.X.toarray())
    dense = next(iter(dataset_of(opened, steps, dense=True)))
    assert np.array_equal(dense.X.numpy(), cells.X.toarray())
    assert np.array_equal(dense["tokens"].numpy(), cells["tokens"])


class TestVocabulary:
    def test_sources(self):
        genes, order = np.array(GENES, object), list(VOCABULARY)
        expected = [VOCABULARY.get(each, -1) for each in GENES]
        places = [order.index(each) if each in order else -1 for each in GENES]
        for source in (VOCABULARY, pd.DataFrame({"token": VOCABULARY})["token"]):
            assert GeneSubset(source).tokens_of(genes).tolist() == expected
        for listed in (order, np.array(order)):
            assert GeneSubset(listed).tokens_of(genes).tolist() == places

    def test_a_column_of_var_has_the_names_or_the_tokens(self, write_h5ad, counts):
        collection = open_collection(write_h5ad(sp.csr_matrix(counts)))
        plain = cells_of(dataset_of(collection, RankTokens(VOCABULARY, max_length=9)))
        ids = {f"ENSG{name}": token for name, token in VOCABULARY.items()} | SPECIAL
        var = pd.DataFrame(index=collection.var_names)
        var["ensembl_id"] = "ENSG" + var.index
        var["token"] = [VOCABULARY.get(each, 5000 + k) for k, each in enumerate(var.index)]
        renamed = RankTokens(ids, max_length=9, gene_names=var["ensembl_id"])
        assert cells_of(dataset_of(collection, renamed)) == plain
        own = RankTokens(pd.concat([pd.Series(SPECIAL), var["token"]]), max_length=9)
        minibatch = next(iter(dataset_of(collection, own)))
        assert minibatch["tokens"][:, 0].tolist() == [1] * 8

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: RankTokens("vocab.json"), "but got 'vocab.json'; read a file with json"),
            (lambda: RankTokens(5), "`vocabulary` must be a mapping from names, or a Series"),
            (lambda: RankTokens(["a", "b", "a"]), "`vocabulary` .* once, but has 'a' 2 times"),
            (lambda: RankTokens({"a": [1], "b": [1, 2]}), r"that of 'a' is \[1\]"),
            (lambda: RankTokens({"a": True}), "that of 'a' is True"),
            (lambda: RankTokens({"a": -1}), "at least 0 and below 2"),
            (lambda: RankTokens({"a": 2**31}), "below 2.31, but that of 'a' is 2147483648"),
            (lambda: RankTokens({"a": 0.5}), "that of 'a' is 0.5"),
            (lambda: RankTokens({"a": 1}), "the vocabulary has no '<pad>'"),
            (lambda: RankTokens(VOCABULARY, {"gene1": 0}), "that of 'gene1' is 0"),
            (lambda: RankTokens(VOCABULARY, {"gene1": "1"}), "that of 'gene1' is '1'"),
            (lambda: RankTokens(VOCABULARY, {"gene1": [1]}), r"that of 'gene1' is \[1\]"),
            (lambda: RankTokens(VOCABULARY, 3), "`medians` must be a mapping"),
            (
                lambda: RankTokens(VOCABULARY, pd.Series([1.0, 2.0], ["gene1", "gene1"])),
                "`medians` must have each name once, but has 'gene1' 2 times",
            ),
            (lambda: RankTokens(VOCABULARY, max_length=2), "`max_length > 2`"),
            (lambda: RankTokens(VOCABULARY, padding=NEITHER), "`padding` must be one"),
            (lambda: BinnedValues(VOCABULARY, 1), "`n_bins >= 2` must hold"),
            (lambda: GeneSubset(VOCABULARY, genes=NEITHER), "`genes` must be one"),
            (lambda: RankTokens(VOCABULARY, masking=MaskValues()), "must be MaskTokens, but got"),
            (
                lambda: RankTokens(VOCABULARY, masking=MaskTokens(mask="<none>")),
                "the vocabulary has no '<none>'",
            ),
            (lambda: MaskTokens(0), "`0 < fraction <= 1` must hold"),
            (lambda: MaskTokens(0.1, random=0.9, kept=0.2), "random=0.9"),
            (lambda: MaskValues(1.5), "fraction=1.5"),
        ],
    )
    def test_what_is_refused(self, make, words):
        with pytest.raises(ParameterError, match=words) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def shared_symbols():
    """Return cells in which genes share symbols, and the same with ids in place of symbols."""
    rng = np.random.default_rng(4)
    var = pd.DataFrame(
        {
            "gene_ids": [f"ENSG{k}" for k in range(8)],
            "median": rng.uniform(0.5, 4, 8),
            "token": 3 + rng.permutation(8),
        },
        index=["TBCE", "CD4", "TBCE", "ACTB", "HSPA14", "A", "B", "HSPA14"],
    )
    var.loc["ACTB", "median"] = np.nan
    X = rng.poisson(1.0, (12, 8)).astype(np.float32)
    with warnings.catch_warnings(action="ignore"):
        return [ad.AnnData(X, var=each) for each in (var, var.set_index("gene_ids", drop=False))]


@pytest.mark.filterwarnings("ignore:Variable names are not unique:UserWarning")
@pytest.mark.parametrize("mask", [None, np.arange(8) != 2, np.arange(8) % 3 != 1])
@pytest.mark.parametrize("kept", [range(8), range(1, 8), [2, 3, 5], [0, 1, 3]])
def test_columns_of_var_apply_by_position(shared_symbols, mask, kept):
    """Ids of genes that share a symbol are those of each gene."""
    vocabulary = dict(zip(["<pad>", "<cls>", "<eos>"], range(3), strict=True))
    vocabulary |= {f"ENSG{k}": 3 + k for k in kept}
    found = list[list[Any]]()
    for cells in shared_symbols:
        collection = open_collection(cells, genes=mask)
        var = collection.var
        by_id = dict(zip(var["gene_ids"], var["median"], strict=True))
        tokenizers = [
            GeneSubset(vocabulary, genes="nonzero", gene_names=var["gene_ids"]),
            RankTokens(vocabulary, by_id, gene_names=var["gene_ids"], max_length=16),
            RankTokens(vocabulary, by_id, gene_names=var["gene_ids"].to_numpy(), max_length=16),
        ]
        found.append([cells_of(dataset_of(collection, each)) for each in tokenizers])
    assert found[0] == found[1]
    assert found[0][1] == found[0][2]


@pytest.mark.filterwarnings("ignore:Variable names are not unique:UserWarning")
def test_names_are_those_of_the_collection(shared_symbols):
    cells, _ = shared_symbols
    ids, some = cells.var["gene_ids"], open_collection(cells, genes=np.arange(8) < 2)
    turned = ids[::-1].set_axis([*"abcdefgh"])  # as many, but of other genes
    for collection, names in ((some, ids), (open_collection(cells), turned), (some, ["TBCE"])):
        told = "`gene_names` must have a name for each of the [28] genes of the collection, in its"
        with pytest.raises(ParameterError, match=told):
            dataset_of(collection, GeneSubset(SPECIAL | {"ENSG0": 9}, gene_names=names))
    with pytest.raises(ParameterError, match="`vocabulary` must have each name once, but has 'TB"):
        GeneSubset(cells.var["token"])


class TestGenesWithMedians:
    """None is refused; genes without one are unknown."""

    @pytest.mark.parametrize(
        ("medians", "told"),
        [
            ({f"ENSG{k}": 1.0 for k in range(9)}, "no gene has a median: there are 18 genes"),
            ({"gene5": 1.0}, "no gene has a median"),  # which has no token
            ({}, "no gene has a median"),
            ({"gene1": np.nan}, "no gene has a median"),
        ],
    )
    def test_none(self, collection, medians, told):
        with pytest.raises(ParameterError, match=told) as caught:
            dataset_of(collection, RankTokens(VOCABULARY, medians))
        assert "\n" not in str(caught.value)

    def test_others_are_unknown(self, collection, counts):
        tokenizer = RankTokens(VOCABULARY, {"gene1": 2.0, "gene2": 2.0, "ENSG1": 1.0})
        dataset = dataset_of(collection, tokenizer)
        for _ in dataset:
            pass
        known = [GENES.index("gene1"), GENES.index("gene2")]
        n_unknown = np.count_nonzero(np.delete(counts, known, axis=1))
        assert dataset.statistics().n_unknown == n_unknown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transform": RankTokens(SPECIAL | {"ACTB": 9})}, "none of 23 genes is in the vocabulary"),
        (
            {"transform": RankTokens({"gene1": 1, "gene2": 1, "<pad>": 0}, cls=None, eos=None)},
            "genes 'gene1' and 'gene2' have the same token 1",
        ),
        ({"transform": [RankTokens(VOCABULARY)] * 2}, "at most one of rows, such as a tokenizer"),
        (
            {"transform": [RankTokens(VOCABULARY), MaskTokens()]},
            r"but got MaskTokens\(.*masks as `masking=` of a tokenizer",
        ),
        ({"transform": [RankTokens(VOCABULARY), Log1p()]}, "must have transforms of values first"),
        (
            {"transform": RankTokens(VOCABULARY), "fetch_transform": copy.copy},
            "leave out `fetch_transform` and `batch_callback`",
        ),
    ],
)
def test_what_does_not_fit_is_refused(collection, options, words):
    with pytest.raises(ParameterError, match=words):
        CellDataset(collection, BlockShuffling(4), 8, seed=0, **options)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_values_that_are_no_counts_are_refused(write_h5ad, counts, value):
    X = counts.copy()
    X[77, 3] = value
    opened = open_collection(write_h5ad(sp.csr_matrix(X)))
    with pytest.raises(FormatError, match="row 77 of the collection has a value that is negative"):
        list(dataset_of(opened, RankTokens(VOCABULARY)))


def test_one_element_has_a_tokenizer(write_h5ad, counts):
    path = write_h5ad(sp.csr_matrix(counts), layers={"raw": sp.csr_matrix(counts)})
    opened = open_collection(path, elements=["X", "layers/raw"])
    steps = dict.fromkeys(["X", "layers/raw"], RankTokens(VOCABULARY))
    with pytest.raises(ParameterError, match="one element may have a tokenizer, but 'X' and"):
        dataset_of(opened, steps)
