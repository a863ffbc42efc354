"""Fixtures that write small AnnData files, in every form that has been seen in the wild."""

import itertools
import multiprocessing
import multiprocessing.forkserver
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader import matrices
from tests.loader.sources.zarr_cells import write_cells
from tests.servers.web import WebServer

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


def pytest_itemcollected(item):
    """What the suites for sources start in processes is marked so."""
    if getattr(item, "originalname", "") == "test_in_worker_processes":
        item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session", autouse=True)
def _server_of_workers() -> None:
    """Start the server that workers are forked from, with all that tests import.

    The first loader that needs it would start it with what cellfeed imports, and each worker would
    import the rest by itself, which takes seconds.
    """
    imported = ["__main__", "anndata", "cellfeed.dataset", "cellfeed.testing"]
    multiprocessing.set_forkserver_preload(imported)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session")
def replace() -> Callable[..., None]:
    return matrices.replace


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory) -> Callable[[], Path]:
    """Unlike `tmp_path`, for tests that hypothesis calls many times."""
    return lambda: tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def url_of(tmp_path_factory) -> Iterator[Callable[[Path], str]]:
    """Return a function that tells the URL of a file of the tests on a web server."""
    pytest.importorskip("obstore")
    folder = tmp_path_factory.getbasetemp().parent
    with WebServer(folder) as server:
        yield lambda path: f"{server.url}/{path.absolute().relative_to(folder)}"


@pytest.fixture
def new_path(tmp_path) -> Callable[..., Path]:
    """Return a function that names a new path with each call."""
    numbers = itertools.count()
    return lambda suffix="": tmp_path / f"{next(numbers):05}{suffix}"


@pytest.fixture
def new_store(new_path) -> Callable[..., Path]:
    """Return a function that writes a zarr store of its own with each call."""
    return lambda X, /, **options: write_cells(new_path(".zarr"), X, **options)


@pytest.fixture(scope="session")
def write_h5ad(new_folder) -> Callable[..., Path]:
    folder, numbers = new_folder(), itertools.count()

    def write(
        X: Any,
        obs: dict[str, Any] | pd.DataFrame | None = None,
        *,
        genes: Any = None,
        layers: dict[str, Any] | None = None,
        chunks: dict[str, int | tuple[int, ...]] | None = None,
        edit: Callable[[h5py.File], None] | None = None,
        nullable: bool = True,
        **options: Any,
    ) -> Path:
        n_rows, n_vars = X.shape
        table = pd.DataFrame(obs or {}, index=[f"cell{i}" for i in range(n_rows)])
        var = pd.DataFrame(index=[f"gene{i}" for i in range(n_vars)] if genes is None else genes)
        path: Path = folder / f"{next(numbers):05}.h5ad"
        with ad.settings.override(allow_write_nullable_strings=nullable):
            ad.AnnData(X, obs=table, var=var, layers=layers).write_h5ad(path, **options)
        if edit is not None or chunks:
            with h5py.File(path, "r+") as file:
                for name, size in (chunks or {}).items():
                    matrices.replace(file, name, file[name][:], chunks=size, compression="gzip")
                if edit is not None:
                    edit(file)
        return path

    return write


@pytest.fixture(scope="session")
def plates(write_h5ad) -> list[Path]:
    """Two CSR files of 37 and 26 cells, with a plate, a cell type and the cell's number."""
    rng = np.random.default_rng(0)
    paths, first = [], 0
    for plate, n_rows in (("p1", 37), ("p2", 26)):
        counts = rng.poisson(0.7, size=(n_rows, 11)).astype(np.float32)
        obs = {
            "plate": pd.Categorical([plate] * n_rows),
            "cell_type": pd.Categorical(rng.choice(["T", "B", "NK"], n_rows)),
            "number": np.arange(first, first + n_rows, dtype=np.float64),
        }
        paths.append(write_h5ad(sp.csr_matrix(counts), obs, compression="gzip"))
        first += n_rows
    return paths


@pytest.fixture(scope="session")
def read_by_anndata() -> Callable[[Path], ad.AnnData]:
    """The oracle: a whole file in memory."""

    def read(path: Path) -> ad.AnnData:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a file is old
            return ad.read_h5ad(path)

    return read


@pytest.fixture(scope="session")
def in_memory(read_by_anndata) -> Callable[..., Any]:
    """The oracle: all rows of some files, dense, as anndata reads them."""

    def read(paths: list[Path], element: str = "X") -> Any:
        parts = []
        for path in paths:
            adata = read_by_anndata(path)
            X = adata.X if element == "X" else adata.layers[element.removeprefix("layers/")]
            parts.append(X if isinstance(X, np.ndarray) else X.toarray())
        return np.vstack(parts)

    return read


@pytest.fixture(scope="session")
def shared_file() -> Callable[[str], Path]:
    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.is_file():
            pytest.skip(f"{name} lies in ../shared/data, which is not here")
        return path

    return find


@pytest.fixture
def python_calls_of_dropping() -> Callable[[list[Any]], list[str]]:
    """Which functions in Python run in this thread where nothing refers to things any more."""

    def calls(held: list[Any]) -> list[str]:
        called = list[str]()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                called.append(frame.f_code.co_qualname)

        sys.setprofile(note)
        try:
            held.clear()
        finally:
            sys.setprofile(None)
        return called

    return calls
