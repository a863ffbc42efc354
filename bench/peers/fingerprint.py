"""A fingerprint of the measuring code, stored with the figures and compared by a test.

It covers the code that times loaders and summarises rounds; adding or removing an entry does not
change the figures of others.
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
    """Return the fingerprint of the measuring code."""
    found = hashlib.blake2b(digest_size=8)
    for name in MODULES:
        found.update((HERE / name).read_bytes())
    return found.hexdigest()
