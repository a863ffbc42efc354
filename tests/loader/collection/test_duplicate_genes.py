"""Genes of one name: refused where they cannot be told apart, and read where they need not be."""

import itertools
from collections import Counter
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellfeed import MismatchError, open_collection

pytestmark = pytest.mark.filterwarnings("ignore:Variable names are not unique:UserWarning")

JOINS = ("same", "inner", "outer", "genes")
GENES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    folder, numbers = tmp_path_factory.mktemp("genes"), itertools.count(1)

    def write_(names: list[str]) -> Path:
        """Write three cells in which every value is another, and is no value of another file."""
        number = next(numbers)
        values = 100.0 * number + np.arange(3.0 * len(names)).reshape(3, len(names))
        obs = pd.DataFrame(index=[f"{number}-{k}" for k in range(3)])
        path: Path = folder / f"{number:04}.h5ad"
        ad.AnnData(values, obs=obs, var=pd.DataFrame(index=list(names))).write_h5ad(path)
        return path

    return write_


def genes_wanted(files: list[list[str]], join: str, genes: list[str]) -> list[str] | None:
    """The oracle: the names by which genes are put together; None where they need no names."""
    if join == "genes":
        return genes if any(file != genes for file in files) else None
    if all(file == files[0] for file in files):
        return None
    sets = [set(file) for file in files]
    return sorted(set.intersection(*sets) if join == "inner" else set.union(*sets))


def joined(paths: list[Path], names: list[str]) -> np.ndarray:
    """The oracle: cells by pandas, which takes columns by name."""
    frames = [ad.read_h5ad(path).to_df() for path in paths]
    return np.vstack(
        [frame[[n for n in names if n in frame]].reindex(columns=names) for frame in frames]
    )


@pytest.mark.parametrize("join", JOINS)
def test_they_are_refused_where_their_names_matter_and_nowhere_else(write, join):
    @settings(
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        first = data.draw(GENES)
        others = [first]
        if join == "same":
            others = data.draw(st.lists(st.permutations(first), max_size=2))
        elif join != "genes":
            others = data.draw(st.lists(st.just(first) | GENES, max_size=2))
        files, genes = [first, *map(list, others)], []
        if join == "genes":
            genes = data.draw(
                st.lists(st.sampled_from(sorted(set(first))), min_size=1, unique=True)
            )
        names = genes_wanted(files, join, genes)
        if join == "inner" and names == []:
            return  # files that share none are refused for that
        paths = [write(file) for file in files]
        options = {"genes": genes} if join == "genes" else {"join_vars": join}
        twice = [
            {n for n, k in Counter(file).items() if k > 1} & set(names or ()) for file in files
        ]
        refused = next((k for k, each in enumerate(twice) if each), None)
        if refused is not None:
            with pytest.raises(MismatchError) as caught:
                open_collection(paths, **options)
            said = str(caught.value)
            assert said.startswith(f"{paths[refused]}: several genes have the same name: ")
            assert [n for n in "abcd" if repr(n) in said] == sorted(twice[refused])
            return
        collection = open_collection(paths, **options)
        if names is None:
            expected = np.vstack([ad.read_h5ad(path).X for path in paths])
            assert collection.var_names.tolist() == first
        else:
            assert sorted(collection.var_names) == sorted(names)
            expected = np.nan_to_num(joined(paths, collection.var_names.tolist()))
        assert np.array_equal(collection[:].X, expected)

    check()


def test_those_of_each_element_are_its_own(write):
    """Genes of ``raw`` may have one name where those of X have not, and the other way round."""
    path = write(["a", "b"])
    adata = ad.read_h5ad(path)
    adata.raw = ad.AnnData(np.arange(9.0).reshape(3, 3), adata.obs, pd.DataFrame(index=list("aab")))
    adata.write_h5ad(path)
    assert open_collection(path, elements=["X"], genes=["b"]).n_vars == 1
    assert open_collection(path, elements=["raw/X"]).var_names.tolist() == list("aab")
    assert np.array_equal(
        open_collection(path, elements=["raw/X"], genes=["b"])[:].X[:, 0], [2, 5, 8]
    )
    with pytest.raises(
        MismatchError, match=f"^{path}: several genes have the same name: 'a'; write "
    ):
        open_collection(path, elements=["X", "raw/X"], genes=["a"])


def test_many_are_shortened(write):
    path = write(2 * [f"g{k}" for k in range(9)])
    with pytest.raises(MismatchError, match="'g0', 'g1', 'g2', 'g3', 'g4' and 4 others; write"):
        open_collection(path, genes=[f"g{k}" for k in range(9)])
