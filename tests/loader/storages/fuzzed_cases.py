"""What fuzzers of metadata share: each case gives right rows, or an error of cellfeed's.

Another end of a case ends the process; the case that is tried is the last line of the output.
"""

import collections
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
