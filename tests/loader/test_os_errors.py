"""`os_errors`: errors of the system, in whatever way libraries raise them, have number and path."""

import errno
import os

import pytest

from cellfeed.extending import FormatError, os_errors

FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "said at length"),
        RuntimeError(f"IO error: {FULL} (os error {errno.ENOSPC})"),  # of zarrs
        ValueError(f"write failed (errno = {errno.ENOSPC}, error message = '{FULL}')"),  # of HDF5
    ],
    ids=["OSError", "zarrs", "HDF5"],
)
def test_they_have_a_number_and_a_path(error):
    with pytest.raises(OSError, match=FULL) as raised, os_errors("out"):
        raise error
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "out")


def test_one_that_another_one_hides():
    def fail() -> None:
        try:
            raise OSError(errno.ENOSPC, FULL)
        finally:
            raise RuntimeError("cannot close the file")

    with pytest.raises(OSError, match=FULL) as raised, os_errors("out"):
        fail()
    assert raised.value.filename == "out"


@pytest.mark.parametrize(
    "error",
    [ValueError("another"), OSError("another"), OSError(errno.ENOENT, "no file", "in"),
     FormatError("in: is damaged (os error 5)")],
)  # fmt: skip
def test_others_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, os_errors("out"):
        raise error
    assert raised.value is error
