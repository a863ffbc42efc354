"""Splits of perturbation studies, beside a brute-force split in pandas and beside cell-load."""

import re
import tomllib
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    open_collection,
    perturbation_datasets,
    perturbation_split,
)

CONTROL = "non-targeting"
DATASETS, LINES = ["d1", "d2"], ["jurkat", "k562", "T.cell"]
PARTS: Any = ("train", "val", "test")
GENES = ["AARS", "NUP107", "RPUSD4", "AARS+NUP107", "RPUSD4+AARS", "AARS+ctrl"]


@st.composite
def studies(draw):
    """Return obs of a study, and what is held out of it, without contradictions."""
    n = draw(st.integers(10, 80))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    obs = pd.DataFrame(
        {
            "dataset": rng.choice(DATASETS, n),
            "cell_type": rng.choice(LINES, n),
            "gene": rng.choice([*GENES, CONTROL], n, p=[0.12] * 6 + [0.28]),
        }
    )
    obs.loc[0, "gene"] = CONTROL
    zeroshot, fewshot = {}, {}
    for (dataset, line), cells in obs.groupby(["dataset", "cell_type"]):
        genes = sorted({*cells["gene"]} - {CONTROL})
        key = f"{dataset}.{line}"
        match draw(st.integers(0, 3)):
            case 0:
                zeroshot[key] = draw(st.sampled_from(["train", "val", "test"]))
            case 1:
                parts = draw(st.lists(st.integers(0, 2), min_size=len(genes), max_size=len(genes)))
                fewshot[key] = {
                    name: [gene for gene, part in zip(genes, parts, strict=True) if part == k]
                    for k, name in enumerate(["val", "test"])
                }
    present = sorted({*obs["dataset"]})
    training = dict.fromkeys(draw(st.lists(st.sampled_from(present), unique=True)), "train")
    return obs, {"training": training, "zeroshot": zeroshot, "fewshot": fewshot}


def brute_force(obs, held_out):
    """Return the part of each cell, one after the other."""
    parts = []
    for cell in obs.itertuples():
        key = f"{cell.dataset}.{cell.cell_type}"
        lists = held_out["fewshot"].get(key)
        if key in held_out["zeroshot"]:
            part = held_out["zeroshot"][key]
        elif lists is not None:
            part = next((part for part in lists if cell.gene in lists[part]), "train")
        else:
            part = "train" if cell.dataset in held_out["training"] else "unused"
        if cell.gene == CONTROL and part != "unused":
            part = "control"
        parts.append(part)
    return pd.Series(parts, index=obs.index, dtype=object)


class TestParts:
    @given(study=studies())
    @settings(max_examples=2 * settings().max_examples)
    def test_are_those_of_brute_force(self, study):
        obs, held_out = study
        split = perturbation_split(
            ad.AnnData(obs=obs.set_index(obs.index.astype(str))), held_out, dataset="dataset"
        )
        parts = brute_force(obs, held_out)
        contexts = pd.MultiIndex.from_frame(obs[["dataset", "cell_type"]])
        for name, rows in zip(PARTS, split, strict=True):
            assert rows.dtype == np.int64
            assert rows.tolist() == obs.index[parts == name].tolist()
            needed = parts == "control"
            if name != "train":
                needed &= contexts.isin(contexts[parts == name])
            assert split.controls(name).tolist() == obs.index[needed].tolist()
        self.check_report(split, obs, parts)

    def check_report(self, split, obs, parts):
        columns = ["dataset", "cell_type", "treatment", "part"]
        table = obs.rename(columns={"gene": "treatment"}).assign(part=parts)
        expected = table.groupby(columns, as_index=False).size()
        report = split.report().sort_values(columns, ignore_index=True)
        assert report[columns].astype(object).equals(expected[columns].astype(object))
        assert report["n_cells"].tolist() == expected["size"].tolist()
        assert not report.duplicated(["dataset", "cell_type", "treatment"]).any()

    def test_one_dataset_needs_no_name(self):
        genes = np.array(["A", "B", CONTROL] * 2)
        lines = np.repeat(["k562", "T.cell"], 3)
        held_out = {"fewshot": {"T.cell": {"test": ["B"]}}}
        train, val, test = perturbation_split(6, held_out, treatment=genes, cell_type=lines)
        assert (train.tolist(), val.tolist(), test.tolist()) == ([0, 1, 3], [], [4])

    def test_perturbations_are_held_out_of_all_cell_lines(self):
        genes = np.array(["A", "B", "C", CONTROL] * 3)
        lines = np.repeat(["k562", "rpe1", "jurkat"], 4)
        held_out = {
            "zeroshot": {"jurkat": "test"},
            "fewshot": {"rpe1": {"val": ["A"]}},
            "perturbations": {"test": ["B"]},
        }
        split = perturbation_split(12, held_out, treatment=genes, cell_type=lines)
        assert [each.tolist() for each in split] == [[0, 2, 6], [4], [1, 5, 8, 9, 10]]
        assert split.controls("val").tolist() == [7]

    def test_cells_without_a_label_are_in_no_part(self):
        genes = np.array(["A", None, CONTROL, "A", "A"], object)
        lines = np.array(["k562", "k562", "k562", None, "k562"], object)
        split = perturbation_split(5, {}, treatment=genes, cell_type=lines)
        assert [each.tolist() for each in split] == [[0, 4], [], []]
        assert split.controls().tolist() == [2]
        assert split.report()["part"].tolist().count("unused") == 2
        assert "unused 2" in repr(split)

    def test_labels_may_be_numbers_and_controls_several(self):
        doses = np.array([0, 1, 2, 3, 10, 1])
        held_out = {"perturbations": {"test": ["10"], "val": ["2"]}}
        split = perturbation_split(
            6, held_out, treatment=doses, cell_type=np.repeat("k562", 6), control=[0, 3]
        )
        assert [each.tolist() for each in split] == [[1, 5], [2], [4]]
        assert split.controls().tolist() == [0, 3]

    def test_labels_that_are_written_alike_are_in_one_part(self):
        genes = np.array([1, "1", 2, "2", "0"], object)
        held_out = {"fewshot": {7: {"test": [1]}}}
        split = perturbation_split(
            5, held_out, treatment=genes, cell_type=np.repeat(7, 5), control=0
        )
        assert [each.tolist() for each in split] == [[2, 3], [], [0, 1]]

    def test_says_what_is_where(self):
        genes = np.array(["A", "B", CONTROL, "A"])
        split = perturbation_split(
            4, {"perturbations": {"val": ["B"]}}, treatment=genes, cell_type=np.repeat("k562", 4)
        )
        assert repr(split) == "PerturbationSplit(control 1, train 2, val 1 cells)"
        unknown: Any = "validation"
        with pytest.raises(ParameterError, match="`part` must be one of 'train', 'val', 'test'"):
            split.controls(unknown)


OBS = pd.DataFrame(
    {
        "dataset": ["replogle"] * 6 + ["tahoe"] * 2,
        "cell_type": ["rpe1"] * 3 + ["jurkat"] * 3 + ["k562"] * 2,
        "gene": ["AARS", "NUP107", CONTROL] * 2 + ["AARS", CONTROL],
    },
    index=[f"cell{k}" for k in range(8)],
)


CANNOT_BE: list[tuple[Any, str]] = [
    # Contradictions.
    (
        {"fewshot": {"replogle.rpe1": {"val": ["AARS"], "test": ["AARS", "NUP107"]}}},
        "[fewshot.\"replogle.rpe1\"]: 'AARS' of 'replogle.rpe1' is in 'val' already and cannot",
    ),
    (
        {"zeroshot": {"replogle.rpe1": "test"}, "fewshot": {"replogle.rpe1": {"val": ["AARS"]}}},
        "[fewshot]: 'replogle.rpe1' is also in [zeroshot], which holds out all",
    ),
    (
        {"zeroshot": {"replogle.rpe1": "test"}, "perturbations": {"val": ["AARS"]}}
        | {"training": {"replogle": "train"}},
        "[perturbations]: 'AARS' of 'replogle.rpe1' is in 'test' already",
    ),
    (
        {"fewshot": {"replogle.rpe1": {"val": ["AARS"]}}, "perturbations": {"test": ["AARS"]}},
        "[fewshot.\"replogle.rpe1\"]: 'AARS' of 'replogle.rpe1' is in 'test' already",
    ),
    (
        {"fewshot": {"replogle.rpe1": {"val": [CONTROL]}}},
        "'non-targeting' is the control, whose cells are in no part",
    ),
    # Names that do not occur.
    ({"training": {"replogel": "train"}}, "[training]: no dataset 'replogel'; near: 'replogle'"),
    (
        {"zeroshot": {"replogl.rpe1": "val"}},
        "[zeroshot]: no cell type 'replogl.rpe1'; near: 'replogle.rpe1'",
    ),
    (
        {"zeroshot": {"replogle.Jurkat ": "val"}},
        "[zeroshot]: no cell type 'replogle.Jurkat '; near: 'replogle.jurkat'",
    ),
    (
        {"zeroshot": {"replogle.k562": "val"}},
        "[zeroshot]: no cell type 'replogle.k562'; near: 'replogle.jurkat', 'replogle.rpe1'",
    ),
    (
        {"fewshot": {"replogle.rpe1": {"test": ["aars", "X"]}}},
        "[fewshot.\"replogle.rpe1\"]: no treatment 'aars', 'X'; near: 'AARS'",
    ),
    (
        {"fewshot": {"tahoe.k562": {"test": ["NUP107"]}}},
        "[fewshot.\"tahoe.k562\"]: no treatment 'NUP107'; there are: 'AARS'",
    ),
    (
        {"perturbations": {"test": ["AARS"]}},
        "[perturbations] in used cell types: no treatment 'AARS'; there are none",
    ),
    # Another layout.
    ({"fewshots": {}}, "held_out: no section 'fewshots'; near: 'fewshot'"),
    ({"zeroshot": ["replogle.rpe1"]}, "'zeroshot' must be a table, but is ['replogle.rpe1']"),
    ({"training": {"replogle": "test"}}, "[training]: replogle = 'test' must be 'train'"),
    (
        {"zeroshot": {"replogle": "val"}},
        "[zeroshot]: no cell type 'replogle'; near: 'replogle.rpe1', 'replogle.jurkat'",
    ),
    ({"zeroshot": {"replogle": {"rpe1": "val"}}}, "must be 'val' or 'test'; keys are in quotes"),
    ({"zeroshot": {"replogle.rpe1": "valid"}}, "'replogle.rpe1' = 'valid' must be 'val' or 'test'"),
    ({"zeroshot": {"replogle.rpe1": 1}}, "[zeroshot]: 'replogle.rpe1' = 1 must be 'val' or 'test'"),
    ({"fewshot": {"replogle.rpe1": ["AARS"]}}, "must have `val` and `test`, but is ['AARS']"),
    (
        {"fewshot": {"replogle": {"rpe1": {}}}},
        "has 'rpe1', but only `val` and `test`; others are trained on, and keys are in quotes",
    ),
    ({"fewshot": {"replogle.rpe1": {"train": []}}}, "has 'train', but only `val` and `test`"),
    ({"fewshot": {"replogle.rpe1": {"val": "AARS"}}}, "val = 'AARS' must be a list"),
    ({"perturbations": {"val": 0.5}}, "[perturbations]: val = 0.5 must be a list"),
    ({"fewshot": {"k562": {"val": 0.5}}}, "val = 0.5 must be a list of perturbations"),
    ({"datasets": {"a.b": "x"}}, "the name 'a.b' has a dot"),
    (["jurkat"], "`held_out` must be the path of a TOML file, or a dict"),
]


@pytest.mark.parametrize(("held_out", "message"), CANNOT_BE)
def test_what_cannot_be_is_refused_in_one_line(held_out, message):
    with pytest.raises(ParameterError, match=re.escape(message)) as raised:
        perturbation_split(ad.AnnData(obs=OBS), held_out, dataset="dataset")
    assert "\n" not in str(raised.value)


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    (
        {"control": "non-targetting"},
        "`control`: gene has no treatment 'non-targetting'; near: 'non-t",
    ),
    ({"control": []}, "`control`: gene has no treatment ''; there are: 'AARS'"),
    ({"control": 0}, "`control`: gene has no treatment '0'; there are: 'AARS'"),
    ({"treatment": "guide"}, "`treatment`: obs has no column 'guide'"),
    ({"dataset": np.zeros(3)}, "`dataset` must have a label for each of 8 rows"),
    ({"dataset": None, "held_out": {"training": {"a": "train"}}}, "give the dataset of each row"),
    ({"dataset": None, "held_out": {"datasets": {"a": "x"}}}, "`AnnData` has no files"),
]


@pytest.mark.parametrize(("parameters", "message"), PARAMETERS)
def test_parameters_that_cannot_be(parameters, message):
    given = {"held_out": {}, "dataset": "dataset"} | parameters
    with pytest.raises((ParameterError, ColumnError), match=re.escape(message)):
        perturbation_split(ad.AnnData(obs=OBS), **given)


TOML = """
log_level = "info"

[datasets]
replogle = "{folder}/replogle"
tahoe = "{folder}/{{tahoe,more}}.h5ad"
unused = "{folder}/nowhere"

[training]
replogle = "train"

[zeroshot]
"replogle.jurkat" = "test"

[fewshot]

[fewshot."tahoe.k562"]
val = ["AARS"]
test = ["NUP107", "RPUSD4"]
"""


def write_study(folder):
    """Write four files of two datasets, and return the path of the TOML file and all of obs."""
    (folder / "replogle").mkdir()
    rng, tables = np.random.default_rng(0), []
    names = {
        "replogle/rpe1.h5": ["rpe1"],
        "replogle/others.h5ad": ["jurkat", "hepg2"],
        "tahoe.h5ad": ["k562"],
        "more.h5ad": ["k562", "rpe1"],
    }
    for name, lines in names.items():
        n = 60
        obs = pd.DataFrame(
            {
                "cell_type": pd.Categorical(rng.choice(lines, n)),
                "gene": pd.Categorical(rng.choice([CONTROL, "AARS", "NUP107", "RPUSD4"], n)),
                "gem_group": pd.Categorical(rng.choice(["1", "2"], n)),
            },
            index=[f"{name}:{k}" for k in range(n)],
        )
        adata = ad.AnnData(rng.poisson(1, (n, 4)).astype(np.float32), obs=obs)
        adata.obsm["X_hvg"] = np.asarray(adata.X)
        adata.write_h5ad(folder / name)
        tables.append(obs.astype(object).assign(dataset="tahoe" if "/" not in name else "replogle"))
    (folder / "study.toml").write_text(TOML.format(folder=folder))
    return folder / "study.toml", pd.concat(tables)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


NOT_READ: list[tuple[Any, type[Exception], str]] = [
    (None, PathError, "No such file"),
    ("[training", FormatError, "is not TOML"),
    (b"\xff", FormatError, "is not TOML"),
    ('[training]\nreplogle = "train"', ParameterError, "no dataset 'replogle'; there are none"),
    (
        '[datasets]\na = "/nowhere"\n[training]\na = "train"',
        PathError,
        r"\[datasets\]: a: /nowhere: no such file",
    ),
]


class TestFiles:
    def test_are_those_of_the_datasets(self, study):
        toml, obs = study
        collection = open_collection(perturbation_datasets(toml), obs=["gene", "cell_type"])
        split = perturbation_split(collection, toml)
        parts = brute_force(obs, tomllib.loads(toml.read_text()))
        names = collection.obs_names(slice(None))
        for name, rows in zip(PARTS, split, strict=True):
            assert rows.size
            assert {*names[rows]} == {*obs.index[parts == name]}
            dataset = CellDataset(collection, BlockShuffling(4, indices=rows), 8, seed=0)
            column: Any = collection.obs["gene"]
            genes = column.categories
            read = list(dataset)
            assert sum(len(each) for each in read) == rows.size
            assert CONTROL not in {genes[code] for each in read for code in each.obs["gene"]}
        assert split.report()["dataset"].unique().tolist() == ["replogle", "tahoe"]

    def test_need_not_be_there_if_rows_say_their_dataset(self, study):
        toml, obs = study
        paths = perturbation_datasets(toml)
        expected = perturbation_split(open_collection(paths), toml)
        names = open_collection(paths).obs_names(slice(None))
        given = perturbation_split(
            open_collection(paths), toml, dataset=obs["dataset"][names].to_numpy()
        )
        assert all(map(np.array_equal, expected, given))

    def test_of_no_dataset_are_refused(self, study):
        toml, _ = study
        paths = perturbation_datasets(toml)
        other = toml.parent / "other.h5ad"
        ad.read_h5ad(paths[-1]).write_h5ad(other)
        with pytest.raises(ParameterError, match=r"other.h5ad is in none of the datasets"):
            perturbation_split(open_collection([*paths, other]), toml)
        with pytest.raises(ParameterError, match="no file of 'tahoe' is in the collection"):
            perturbation_split(open_collection(toml.parent / "replogle"), toml)
        twice = {"datasets": {"a": str(paths[0]), "b": str(paths[0])}}
        twice |= {"training": {"a": "train", "b": "train"}}
        with pytest.raises(ParameterError, match=r"is in 'a' and in 'b'; a file belongs to one"):
            perturbation_split(open_collection(paths[0]), twice)

    @pytest.mark.parametrize(("text", "error", "message"), NOT_READ)
    def test_that_cannot_be_read(self, tmp_path, text, error, message):
        path = tmp_path / "a.toml"
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(error, match=message) as raised:
            perturbation_datasets(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)

    def test_are_divided_as_by_cell_load(self, study):
        modules = pytest.importorskip("cell_load.data_modules")
        toml, _ = study
        theirs = modules.PerturbationDataModule(
            toml_config_path=str(toml),
            embed_key="X_hvg",
            num_workers=0,
            batch_col="gem_group",
            pert_col="gene",
            cell_type_key="cell_type",
            control_pert=CONTROL,
            should_yield_control_cells=True,
        )
        theirs.setup()
        collection = open_collection(perturbation_datasets(toml))
        split = perturbation_split(collection, toml)
        names = collection.obs_names(slice(None))
        for part, rows in zip(PARTS, split, strict=True):
            found = set()
            for subset in getattr(theirs, f"{part}_datasets"):
                own = ad.read_h5ad(subset.dataset.h5_path, backed="r").obs_names
                found |= {*own[np.asarray(subset.indices, int)]}
            assert {*names[rows], *names[split.controls(part)]} == found
