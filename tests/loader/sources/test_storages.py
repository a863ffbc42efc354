"""Storages of other packages are opened by `open_collection`: by URL, suffix, content or folder."""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.sources.arriving import Arriving, Rows
from tests.warm import python as warm

from cellfeed import Collection, FormatError, ParameterError, PathError, open_collection
from cellfeed.sources import Location, Storage, register
from cellfeed.sources._registry import built_in

ROOT = Path(__file__).parents[3]
LAYOUTS = "one of 'csr', 'dense', 'ragged'"
MATRIX = sp.csr_array(np.arange(12, dtype=np.float32).reshape(3, 4))


def open_arriving(location, elements):
    return [Arriving(location, {"X": Rows(MATRIX, ["a", "b", "c", "d"])})]


def open_two(location, elements):
    return 2 * open_arriving(location, elements)


def has_mark(path):
    return (path / "mark.txt").is_file()


@pytest.fixture(autouse=True)
def storages():
    register(Storage(name="test URLs", open=open_arriving, schemes=("test-url",)))
    register(Storage(name="test files", open=open_two, suffixes=(".two",)))
    register(Storage(name="test folders", open=open_arriving, recognizes=has_mark))


def test_a_url():
    collection = open_collection("test-url://host//cells?version=2")
    assert collection.locations == (Location("test-url://host//cells?version=2"),)
    assert collection.files == ()
    assert np.array_equal(collection[[2, 0]].X.toarray(), MATRIX.toarray()[[2, 0]])


def test_files_and_folders(tmp_path, write_h5ad):
    (tmp_path / "cells.two").touch()
    (tmp_path / "other.three").touch()
    assert len(open_collection(tmp_path / "cells.two")) == 6
    assert len(open_collection(f"{tmp_path}/c*.two")) == 6
    h5ad = shutil.copy(write_h5ad(MATRIX), tmp_path / "a.h5ad")
    assert len(open_collection([h5ad, Location("test-url://a")], join_vars="outer")) == 6
    names = [each.name for each in open_collection(tmp_path, join_vars="outer").locations]
    assert names == ["a.h5ad", "cells.two", "cells.two"]


def test_by_content(tmp_path):
    folder = tmp_path / "any name"
    folder.mkdir()
    with pytest.raises(PathError, match=r"has nothing that can be opened \(.*\.h5ad, .*two"):
        open_collection(folder)
    (folder / "mark.txt").touch()
    collection = open_collection(folder)
    assert collection.locations == (Location(str(folder)),)
    assert collection.files == (folder / "mark.txt",)


def test_the_last_one_that_is_registered_is_asked_first():
    def open_twice(location, elements):
        return open_two(location, elements)

    register(Storage(name="test URLs, too", open=open_twice, schemes=("test-url",)))
    assert len(open_collection("test-url://a")) == 6
    register(Storage(name="test URLs, too", open=open_twice, schemes=("test-else",)))
    assert len(open_collection("test-url://a")) == 3


@pytest.mark.parametrize("kind", [PathError, FormatError])
def test_what_nothing_opens(tmp_path, kind):
    where = "soma://bucket/cells" if kind is PathError else str(tmp_path / "cells.three")
    Path(tmp_path / "cells.three").write_text("nothing")
    with pytest.raises(kind) as raised:
        open_collection(where)
    said = str(raised.value)
    assert said.startswith(f"{where}: no storage opens ")
    assert "AnnData (.h5ad, .h5mu, .zarr, " in said
    assert "test URLs (test-url://)" in said
    assert "\n" not in said


def test_a_url_of_a_local_file():
    said = r"^file:///a\.h5ad: no storage opens file://; give its path$"
    with pytest.raises(PathError, match=said):
        open_collection("file:///a.h5ad")


@pytest.mark.parametrize("given", ["a.h5ad", ["a.h5ad"], [], np.eye(3)])
def test_a_collection_of_no_sources(given):
    said = r"must be a list of sources.*`open_collection\(paths\)`"
    with pytest.raises(ParameterError, match=said):
        Collection(given)


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("shape", None, "`shape` of `Rows` must be a `tuple`, but is None"),
        ("dtype", "float32", "`dtype` of `Rows` must be a `dtype`, but is 'float32'"),
        ("layout", None, f"`layout` of `Rows` must be {LAYOUTS}, but got None"),
        ("layout", "Dense", f"`layout` of `Rows` must be {LAYOUTS}, but got 'Dense'"),
        ("location", "a", "`location` of `Arriving` must be a `Location`, but is 'a'"),
        ("elements", None, "`elements` of `Arriving` must be a `Mapping`, but is None"),
    ],
)
def test_what_a_source_does_not_state(changed, value, said):
    (source,) = open_arriving(Location("test-url://a"), ["X"])
    stating = source if hasattr(source, changed) else source.elements["X"]
    setattr(stating, changed, value)
    register(Storage(name="test URLs", open=lambda *_: [source], schemes=("test-url",)))
    with pytest.raises(ParameterError, match=f"^{re.escape(said)}$"):
        open_collection("test-url://a")


def test_an_open_that_returns_no_list():
    returns_none: Any = lambda *_: None  # noqa: E731
    register(Storage(name="test URLs", open=returns_none, schemes=("test-url",)))
    said = "test-url://a: `open` of test URLs must return a list of sources, but returned None"
    with pytest.raises(ParameterError, match=f"^{re.escape(said)}$"):
        open_collection("test-url://a")


def test_an_element_that_is_not_there():
    message = "test-url://a: has no `layers/counts`; its elements are: `X`"
    with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
        open_collection("test-url://a", elements=["X", "layers/counts"])


def test_the_same_url_twice():
    with pytest.raises(PathError, match=r"^test-url://a: given twice"):
        open_collection(["test-url://a", Location("test-url://a")])


PLUGIN = """
from cellfeed.sources import Storage
from tests.loader.sources.test_storages import open_two
TWO = Storage(name="plugged in", open=open_two, schemes=("plugged",))
"""
RUN = """
import sys, warnings
from cellfeed import open_collection
open_collection(sys.argv[1])
assert "plugged_in" not in sys.modules  # what is known already does not need it
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(len(open_collection("plugged://there")))
print(*(str(each.message) for each in told), sep="\\n")
"""


@pytest.mark.process
def test_entry_points(tmp_path, write_h5ad):
    (tmp_path / "plugged_in.py").write_text(PLUGIN)
    info = tmp_path / "plugged_in-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-in\nVersion: 1.0\n")
    points = "two = plugged_in:TWO\nabsent = no_such_module:X\nwrong = plugged_in:open_two\n"
    (info / "entry_points.txt").write_text(f"[cellfeed.sources]\n{points}")
    paths = [str(tmp_path), str(ROOT), *sys.path]
    script = f"import sys; sys.path[:0] = {paths!r}\n{RUN}"
    n_cells, absent, wrong = warm.output_of("-c", script, write_h5ad(MATRIX)).splitlines()
    assert n_cells == "6"
    assert absent.startswith("the entry point 'no_such_module:X' of cellfeed.sources cannot be")
    assert wrong.startswith("the entry point 'plugged_in:open_two' of cellfeed.sources is no")


def test_locations():
    here, there = Location.of(Path("a/b.h5ad")), Location.of("s3://bucket/b.zarr/")
    assert (here.path, here.scheme, here.name) == (Path("a/b.h5ad"), "", "b.h5ad")
    assert (there.path, there.scheme, there.name) == (None, "s3", "b.zarr")
    assert (str(there), Location.of(there)) == ("s3://bucket/b.zarr/", there)
    assert Path(here) == Path("a/b.h5ad")
    with pytest.raises(PathError, match=r"^s3://bucket/b\.zarr/: is not a local file; "):
        Path(there)


PAGE = ROOT / "docs" / "reference" / "opening.md"


def test_each_storage_is_on_the_page():
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* (?:\| [^|\n]+){6}\| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )
    # Other tests register their own.
    storages = [each for each in built_in() if each.open.__module__.startswith("cellfeed.")]
    assert dict(rows).keys() == {each.name for each in storages}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {f"`cellfeed[{each}]`" for each in extras["optional-dependencies"]}
    assert {*dict(rows).values()} <= {*named, "nothing"}


@pytest.mark.parametrize("suffixes", [".toy", ("toy",)])
def test_suffixes_that_match_nothing(suffixes):
    with pytest.raises(ParameterError, match=r"`suffixes` of toys must be like \(\"\.h5ad\",\)"):
        Storage(name="toys", open=open_arriving, suffixes=suffixes)


class WithoutColumns(Arriving):
    def obs_names(self):
        return ["plate", "drug"]

    def read_obs(self, columns):
        return pd.DataFrame({"plate": ["x"] * 3})


class WithoutFrame(WithoutColumns):
    def read_obs(self, columns):
        return {"plate": ["x"] * 3, "drug": ["y"] * 3}


def test_a_source_whose_obs_is_no_data_frame():
    source = WithoutFrame(Location("test-url://cells"), {"X": Rows(MATRIX, ["a", "b", "c", "d"])})
    with pytest.raises(FormatError, match=r"`read_obs` must return a data frame$"):
        _ = open_collection(source, obs=["plate"]).obs["plate"]


def test_a_source_that_leaves_out_a_column():
    """It does not count as missing values."""
    source = WithoutColumns(Location("test-url://cells"), {"X": Rows(MATRIX, ["a", "b", "c", "d"])})
    assert list(open_collection(source, obs=["plate"]).obs) == ["plate"]
    with pytest.raises(FormatError, match="`read_obs` returned no column 'drug'"):
        _ = open_collection(source, obs=["plate", "drug"]).obs["drug"]
