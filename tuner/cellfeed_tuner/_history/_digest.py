"""What something is known by: a short digest of plain values."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Fingerprint", "digest", "fingerprint"]

_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What something is known by: eight hexadecimal digits, and the plain values behind them."""

    digest: str
    facts: Mapping[str, Any] = field(compare=False)


def fingerprint(facts: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of plain values.

    Examples
    --------
    >>> len(fingerprint({"cores": 2, "kernel": "Linux 6"}).digest)
    8
    """
    return Fingerprint(digest(json.dumps(facts, sort_keys=True).encode()), dict(facts))


def digest(content: bytes) -> str:
    """Return eight hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
