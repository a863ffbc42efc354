"""Make the stores that some loaders need, and measure the cost."""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import processes
from collection import Collection
from processes import FailedError, Interpreters, say

JOBS = Path(__file__).parent / "jobs"
CONVERSION_SECONDS = 7200  # after which one is ended


@dataclass(frozen=True)
class Conversion:
    """A way to make a store.

    Attributes
    ----------
    storage
        The storage that entries read.
    title
        Name in the table.
    environment
        Whose interpreter makes it; None is the project's own.
    suffix
        Suffix of the store's folder.
    codec
        Codec of `cellfeed preshuffle`, which makes it; None if `jobs/convert.py` does.
    """

    storage: str
    title: str
    environment: str | None
    suffix: str = ""
    codec: str | None = None

    def command(self, interpreter: Path, collection: Collection, target: Path) -> list:
        """Return the command that makes the store."""
        if self.codec is not None:
            cellfeed = Path(sys.executable).parent / "cellfeed"
            return [cellfeed, "preshuffle", f"--codec={self.codec}", collection.folder, target]
        return [interpreter, JOBS / "convert.py", self.storage, target, *collection.plates]


CONVERSIONS = (
    Conversion("annbatch", "annbatch, DatasetCollection.add_adatas", "annbatch", ".zarr"),
    # In annbatch's layout, which annbatch reads in the same rounds.
    Conversion("cellfeed", "cellfeed preshuffle --codec annbatch", None, ".zarr", "annbatch"),
    Conversion("delta", "cellfeed preshuffle", None, ".zarr", "delta"),
    Conversion("cellstream", "cellstream, write_cell_archive", None),
    Conversion("tiledbsoma", "TileDB-SOMA, register_h5ads and from_h5ad", "tiledbsoma"),
)


@dataclass
class Store:
    """A store, and what it cost each time it was made.

    Attributes
    ----------
    conversion
        How it is made.
    path
        Its folder.
    runs
        Seconds, peak memory and bytes on disk of each run.
    error
        Why it cannot be made; None if it can.
    """

    conversion: Conversion
    path: Path
    runs: list[dict]
    error: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether it can be read."""
        return self.path.exists() and bool(self.runs)


class Stores:
    """The stores of a collection, kept between runs of the comparison.

    Parameters
    ----------
    folder
        Where they are kept, each with a record beside it.
    collection
        The cells in them.
    conversions
        Which ones to make.
    """

    def __init__(self, folder: Path, collection: Collection, conversions: list[Conversion]):
        self._collection, self.all = collection, dict[str, Store]()
        for each in conversions:
            path = folder / f"{each.storage}{each.suffix}"
            known = {"collection": None, "runs": []}
            if path.exists() and _record_of(path).exists():
                known = json.loads(_record_of(path).read_text())
            runs = known["runs"] if known["collection"] == collection.identity else []
            self.all[each.storage] = Store(each, path, runs)

    def path(self, storage: str | None) -> Path:
        """Return the folder of cells in some storage."""
        in_store = storage in self.all
        return self.all[storage].path if in_store else self._collection.folder

    def why_not(self, storage: str | None) -> str | None:
        """Return why cells cannot be read from some storage, or None."""
        store = self.all.get(storage)
        if store is None or store.is_there:
            return None
        return f"the store could not be made: {store.error}"

    def make(self, store: Store, interpreters: Interpreters, logs: Path) -> None:
        """Make a store once more, and measure that."""
        try:
            interpreter = interpreters.of(store.conversion.environment)
        except FailedError as error:
            store.error = str(error)
            return
        new = store.path.with_name(f"new-{store.path.name}")
        shutil.rmtree(new, ignore_errors=True)
        processes.drop_pages([self._collection.folder])
        say(f"Converting: {store.conversion.title} ...")
        outcome = processes.run(
            store.conversion.command(interpreter, self._collection, new),
            timeout=CONVERSION_SECONDS,
            log=logs / f"convert-{store.conversion.storage}-{len(store.runs) + 1}.err",
            watch_memory=True,
        )
        flush_start = time.perf_counter()
        os.sync()  # a store counts as made when it is on disk
        if outcome.error is not None:
            store.error = outcome.error
            shutil.rmtree(new, ignore_errors=True)
            return
        seconds = outcome.seconds + time.perf_counter() - flush_start
        size = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        cost = {"seconds": seconds, "peak_bytes": outcome.peak_bytes, "disk_bytes": size}
        store.runs.append(cost)
        shutil.rmtree(store.path, ignore_errors=True)
        new.rename(store.path)
        record = {"collection": self._collection.identity, "runs": store.runs}
        _record_of(store.path).write_text(json.dumps(record))


def _record_of(store: Path) -> Path:
    return store.with_name(f"{store.name}.json")
