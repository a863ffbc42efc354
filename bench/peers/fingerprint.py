"""Which code measured: its fingerprint stays with the figures, and a test holds it against today's.

It is of what times loaders and sums up rounds; entries that come and go change no other's figures.
"""

import hashlib
from pathlib import Path

HERE = Path(__file__).parent
MODULES = (
    *("figures.py", "intervals.py", "page_cache.py", "rounds.py", "jobs/protocol.py"),
    *("jobs/load_annbatch.py", "jobs/load_annloader.py", "jobs/load_cellfeed.py"),
    *("jobs/load_cellstream.py", "jobs/load_scdataset.py"),
)


def measuring_code() -> str:
    """Return the fingerprint of the code that measures."""
    found = hashlib.blake2b(digest_size=8)
    for name in MODULES:
        found.update((HERE / name).read_bytes())
    return found.hexdigest()
