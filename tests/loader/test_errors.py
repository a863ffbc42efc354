import pytest

import cellfeed
from cellfeed import CellfeedError, _errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        ("PathError", FileNotFoundError),
        ("FormatError", ValueError),
        ("MismatchError", ValueError),
        ("ColumnError", LookupError),
        ("ParameterError", ValueError),
    ],
)
def test_errors_can_be_caught_as_ours_and_as_built_in(error, builtin):
    kind = getattr(cellfeed, error)
    assert issubclass(kind, CellfeedError)
    assert issubclass(kind, builtin)
    assert str(kind("cells.h5ad: no such file")) == "cells.h5ad: no such file"


def test_the_tree_in_the_module_is_complete():
    drawn = _errors.__doc__ or ""
    kinds = [name for name in vars(_errors) if name.endswith("Error")]
    assert all(name in drawn for name in kinds)
    assert set(kinds) <= set(cellfeed.__all__)
