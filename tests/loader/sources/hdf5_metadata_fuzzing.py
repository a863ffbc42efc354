"""Makes HDF5 files with odd and hostile sizes over and over; run in a process that may crash.

``python -m tests.loader.sources.hdf5_metadata_fuzzing N [FIRST]`` writes matrices with shapes,
chunks, dtypes, filters and row pointers that anndata would not write. Each case gives the rows that
HDF5 itself reads, or an error of cellfeed's. Another end of a case ends the process; the case that
is tried is the last line of the output. `zarr_metadata_fuzzing` shares that.
"""

import collections
import resource
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from cellfeed import CellfeedError, open_collection

Rows = npt.NDArray[Any]

N_ROWS, N_VARS = 40, 12
MATRIX = np.random.default_rng(0).poisson(0.7, (N_ROWS, N_VARS)).astype(np.float32)
CSR = sp.csr_matrix(MATRIX)
POINTERS = [-1, -(1 << 62), 1 << 31, 1 << 40, 1 << 60, (1 << 63) - 1, -(1 << 63), 0, 1, 240, 241, 7]
_MEMORY = 6 << 30  # of this process, so that it is refused more before the machine is full
_READ_BY_ORACLE = 1 << 26  # bytes of an array; larger ones are not what was written


def try_cases(make: Callable[[Path], Callable[[int], str]], n: str, first: str = "0") -> None:
    """Try cases ``first`` and following, and tell how often what happened.

    Parameters
    ----------
    make
        Given a folder, returns what tries the case of a number, and says `outcome`.
    n, first
        How many, and the number of the first.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for category in (FutureWarning, RuntimeWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)  # of what is odd, which it is
    counts = collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        try_case = make(Path(folder))
        for number in range(int(first), int(first) + int(n)):
            counts[try_case(number)] += 1
    told = ", ".join(f"{result} {count}" for result, count in sorted(counts.items()))
    sys.stdout.write(f"{told}\n")


def say(number: int, case: str) -> None:
    """Say what is about to be tried, for whoever finds that it was the last."""
    sys.stdout.write(f"case {number}: {case}\n")
    sys.stdout.flush()


def outcome(path: Path, oracle: Callable[[], Rows]) -> str:
    """Read all rows, and compare them with those of the format's own library."""
    try:
        X = open_collection(path)[::-1].X
    except CellfeedError as error:
        message = str(error)
        assert message.startswith(str(path)), message
        assert "\n" not in message, message
        return "told"
    rows = np.asarray(X if isinstance(X, np.ndarray) else X.toarray())[::-1]
    expected = oracle()
    if rows.shape != expected.shape or not np.array_equal(rows, expected, equal_nan=True):
        raise AssertionError(f"other rows than {expected}: {rows}")
    return "same"


def small(array: Any) -> npt.NDArray[Any]:
    n_bytes = array.dtype.itemsize
    for n in array.shape:
        n_bytes *= n
    assert n_bytes <= _READ_BY_ORACLE, array
    return np.asarray(array[...])


def dense_rows(data: Rows, indices: Rows, indptr: Rows, shape: tuple[int, ...]) -> Rows:
    """Return a CSR matrix as a dense one, by nothing that believes all that it is given."""
    assert indptr[0] == 0, indptr
    assert indptr[-1] == data.size == indices.size, indptr
    assert data.size == 0 or 0 <= indices.min() <= indices.max() < shape[1]
    for integers in (indices, indptr):
        assert integers.dtype.kind in "iuf"
        assert np.array_equal(integers, integers.astype(np.int64))
    counts = np.diff(indptr.astype(object)).astype(np.int64)
    assert counts.min(initial=0) >= 0, indptr
    dtype = np.dtype(np.float32) if data.dtype == np.float16 else data.dtype.newbyteorder("=")
    matrix = np.zeros(shape, dtype)
    rows = np.repeat(np.arange(shape[0]), counts)
    np.add.at(matrix, (rows, indices.astype(np.int64)), data.astype(dtype))
    return matrix


class Hdf5Cases:
    """One file for each case, whose arrays are made anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._template = folder / "template"
        with h5py.File(self._template, "w") as file:
            file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
            for name, n in (("obs", N_ROWS), ("var", N_VARS)):
                table = file.create_group(name)
                table.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0"})
                table.attrs["_index"] = "_index"
                table.attrs["column-order"] = np.empty(0, "S1")
                table["_index"] = np.arange(n)
                table["_index"].attrs.update(
                    {"encoding-type": "array", "encoding-version": "0.2.0"}
                )

    def __call__(self, number: int) -> str:
        rng = np.random.default_rng([1, number])
        path = self._folder / f"{number}.h5ad"
        shutil.copy(self._template, path)
        try:
            with h5py.File(path, "r+") as file:
                what = write_matrix(file, rng)
            say(number, what)
            return outcome(path, lambda: read_hdf5(path))
        finally:
            path.unlink()


H5_SIZES = [0, 1, 2, 7, N_VARS, N_ROWS, 1 << 16, 1 << 31, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1]
H5_CHUNKS = [1, 2, 5, 8, 12, 16, 40, 100, 1 << 14, 1 << 20, 1 << 24, 1 << 28, (1 << 29) - 1]
H5_DTYPES = ["<f4", "<f8", "<f2", "<i4", "<i8", "<u8", "|i1", ">f4", "<f16", "<c8", "|b1", "|S3"]
H5_FILTERS: list[dict[str, Any]] = [
    *({}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}, {"shuffle": True}),
    *({"compression": "lzf"}, {"fletcher32": True}, dict(hdf5plugin.Zstd())),
    *(dict(hdf5plugin.Blosc()), {"scaleoffset": 0}),
]


def write_matrix(file: h5py.File, rng: np.random.Generator) -> str:
    """Write X, dense or sparse, with odd numbers; return what they are."""
    if rng.random() < 0.4:
        return f"X {write_array(file, 'X', MATRIX, rng, odd=True)}"
    X = file.create_group("X")
    X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
    shape = [N_ROWS, N_VARS]
    if rng.random() < 0.2:
        number = rng.choice(np.array([-1, *H5_SIZES]))
        shape[rng.integers(2)] = int(number)
    X.attrs["shape"] = shape
    indptr, indices = CSR.indptr.astype(np.int64), CSR.indices.copy()
    what = f"shape {shape}"
    if rng.random() < 0.3:
        where, number = int(rng.integers(indptr.size)), POINTERS[rng.integers(len(POINTERS))]
        indptr[where] = number
        what += f", indptr[{where}] = {number}"
    if rng.random() < 0.2:
        where, number = int(rng.integers(indices.size)), int(rng.choice([-1, 12, 13, 1 << 30]))
        indices[where] = number
        what += f", indices[{where}] = {number}"
    odd = rng.integers(4)
    arrays: dict[str, Rows] = {"indptr": indptr, "indices": indices, "data": CSR.data}
    for k, (name, values) in enumerate(arrays.items()):
        what += f", {name} {write_array(X, name, values, rng, odd=odd == k)}"
    return what


def write_array(
    group: Any, name: str, values: npt.NDArray[Any], rng: np.random.Generator, *, odd: bool
) -> str:
    """Write an array as usual or, if odd, with other sizes, dtype, filters or chunks."""
    options: dict[str, Any] = {"chunks": (8, 12) if values.ndim > 1 else (16,)}
    shape, dtype = values.shape, values.dtype.str
    if odd:
        options |= H5_FILTERS[rng.integers(len(H5_FILTERS))]
        options["maxshape"] = (None,) * values.ndim
        options["chunks"] = tuple(int(rng.choice(H5_CHUNKS)) for _ in shape)
        options["fillvalue"] = [None, None, 0, 1, -1, float("nan")][rng.integers(6)]
        if rng.random() < 0.3:
            dtype = H5_DTYPES[rng.integers(len(H5_DTYPES))]
        if rng.random() < 0.3:
            shape = tuple(int(rng.choice(H5_SIZES)) if rng.random() < 0.5 else n for n in shape)
    what = f"{dtype} {shape} {options}"
    try:
        stored = group.create_dataset(name, shape=shape, dtype=dtype, **options)
        if shape == values.shape and np.prod([float(n) for n in options["chunks"]]) < 1 << 22:
            stored[...] = values.astype(dtype)
            # What HDF5 itself decodes, it takes to have the right size: it may crash, or deliver
            # what lies in memory behind the chunk.
            decoded_here = (
                not {"fletcher32", "scaleoffset"} & set(options)
                and options.get("fillvalue") in (None, 0)
                and np.dtype(dtype) == values.dtype
            )
            if odd and decoded_here and rng.random() < 0.3:
                n_bytes, mask = int(rng.choice([0, 1, 64, 1 << 16])), int(rng.integers(4))
                stored.id.write_direct_chunk((0,) * values.ndim, bytes(n_bytes), mask)
                what += f", chunk of {n_bytes} bytes with mask {mask}"
    except (AttributeError, MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
        # HDF5 itself refuses to write it.
        if name in group:
            del group[name]
        group.create_dataset(name, data=values)
        what += f", refused ({type(error).__name__})"
    return what


def read_hdf5(path: Path) -> Rows:
    """Return all rows as HDF5 itself reads them."""
    with h5py.File(path) as file:
        X = file["X"]
        if hasattr(X, "dtype"):
            assert X.shape == (N_ROWS, N_VARS), X
            return small(X)
        shape = tuple(int(n) for n in X.attrs["shape"])
        assert shape == (N_ROWS, N_VARS)
        return dense_rows(small(X["data"]), small(X["indices"]), small(X["indptr"]), shape)


if __name__ == "__main__":
    try_cases(Hdf5Cases, *sys.argv[1:])
