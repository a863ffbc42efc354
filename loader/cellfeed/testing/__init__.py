"""Conformance suites: tests that an extension of cellfeed inherits by supplying one fixture.

`SourceConformance` compares any storage with NumPy in memory, `StorageDamageConformance` checks
what it does with files that are damaged or change, and `StrategyConformance` checks any sampling
strategy against its declared properties.
"""

try:
    import hypothesis  # noqa: F401 - whether it is there
    import pytest
except ImportError as error:
    msg = "cellfeed.testing needs two more packages: pip install pytest hypothesis"
    raise ImportError(msg) from error

pytest.register_assert_rewrite(
    *(f"cellfeed.testing.{name}" for name in ("_damage", "_source", "_strategy"))
)

# After its asserts are registered.
from cellfeed.testing._damage import StorageDamageConformance  # noqa: E402
from cellfeed.testing._source import SourceConformance, StoredCase  # noqa: E402
from cellfeed.testing._strategy import StrategyCase, StrategyConformance  # noqa: E402

__all__ = [
    "SourceConformance",
    "StorageDamageConformance",
    "StoredCase",
    "StrategyCase",
    "StrategyConformance",
]
