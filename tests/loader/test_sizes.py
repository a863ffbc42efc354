"""Sizes as people write them."""

import numpy as np
import pytest

from cellfeed import ParameterError, open_collection
from cellfeed.console import ByteSize


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        (" 1.5 tb ", 1_500_000_000_000),
        ("8k", 8000),
        ("0.1GB", 10**8),
        ("7", 7),
        (300, 300),
        (np.int32(300), 300),
    ],
)
def test_sizes(given, n_bytes):
    parsed = ByteSize().convert(given, None, None)
    assert (parsed, type(parsed)) == (n_bytes, int)


@pytest.mark.parametrize(
    "given",
    ["", "GB", "much", "-1GB", "1EB", "1 G B", "1e9", "²GB", "0GB", 0, -5, 1.5, True, b"1GB"],
)
def test_what_is_no_size(given):
    with pytest.raises(ParameterError, match="`cache") as raised:
        open_collection("https://example.org/a.h5ad", cache=given)
    assert repr(given) in str(raised.value) or given == "0GB"
    assert "\n" not in str(raised.value)
